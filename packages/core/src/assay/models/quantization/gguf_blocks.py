"""Read quantized weights of GGUF files: blocks of 32 or 256 inputs, with scales and minima of parts of them.

Source of the layouts: llama.cpp, `ggml-common.h`, and the package gguf 0.19, `quants.py`.
"""

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from assay.models.gguf_files import BLOCK_TYPES, PREFIX
from assay.models.quantization.quantized_weight import Grid, Groups, QuantizedWeight
from assay.models.quantization.stored_weights import Format, WeightStore, precision_of

_Array = NDArray[np.float32]


def _dequantize(kind: str, stored: WeightStore, module: str) -> Tensor:
    """Return the values in float32, as the package gguf computes them."""
    from gguf import GGMLQuantizationType, dequantize

    name = f"{module}.{PREFIX}{kind}"
    blocks = stored.fetch(name, name, (None, None)).contiguous().numpy()
    return torch.from_numpy(np.ascontiguousarray(dequantize(blocks, GGMLQuantizationType[kind])))


def _read(kind: str, stored: WeightStore, module: str) -> QuantizedWeight:
    """Read a weight. Each type packs codes differently, so they are computed from the values."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    values, num_bits = _dequantize(kind, stored, module), int(kind[1])
    size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    blocks = stored.read(f"{module}.{PREFIX}{kind}").contiguous().view(-1, size)
    scales, minima = (torch.from_numpy(one).flatten() for one in _read_scales(kind, blocks.numpy()))
    zeros = torch.full_like(scales, 1 << (num_bits - 1))
    if is_shifted := bool(len(minima)):
        # A scale of 0 makes all values the minimum, as code 0 with this scale and zero point 1.
        scales = torch.where(scales == 0, -minima, scales)
        zeros = torch.where(scales == 0, 0, -minima / scales)
    parts = values.view(len(scales), -1).double()
    codes = (parts / torch.where(scales == 0, 1, scales)[:, None] + zeros[:, None]).round()
    return QuantizedWeight(
        codes=codes.clamp(0, (1 << num_bits) - 1).to(torch.uint8).view(values.shape),
        grid=Grid.of_unsigned(num_bits),
        groups=Groups((values.shape[0], values.shape[1]), (1, parts.shape[1])),
        scales=scales,
        # llama.cpp rounds codes before it rounds scales, except in the types with 256 inputs per block.
        scale_precision=0.0 if kind.endswith("K") else precision_of(torch.empty(0).half()),
        stored_zeros=zeros if is_shifted else None,
        middle=0.0 if is_shifted else float(zeros[0]),
    )


def _read_scales(kind: str, blocks: NDArray[np.uint8]) -> tuple[_Array, _Array]:
    """Return scale and minimum (the value of code 0; empty if it is symmetric) of each group.

    blocks: blocks x bytes.
    """
    from gguf.quants import Q4_K

    def half(start: int) -> _Array:
        return blocks[:, start : start + 2].copy().view(np.float16).astype(np.float32)

    if kind == "Q6_K":
        return half(208) * blocks[:, 192:208].view(np.int8), half(0)[:0]
    if kind.endswith("K"):
        scales, minima = Q4_K.get_scale_min(blocks[:, 4:16])
        return half(0) * scales, -half(2) * minima
    return half(0), half(2) if kind.endswith("1") else half(0)[:0]


def _format_of(kind: str) -> Format:
    marker = f"{PREFIX}{kind}"  # as `scales` it counts bytes, an upper bound of the scales
    values = partial(_dequantize, kind)
    return Format(marker, marker, (marker,), partial(_read, kind), values=values)


GGUF_FORMATS = tuple(map(_format_of, BLOCK_TYPES))
