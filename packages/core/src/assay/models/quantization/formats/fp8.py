"""fp8 weights with a scale per block or row, as DeepSeek and Transformers' fp8 store them.

Sources of the layouts: Transformers 5.23, `integrations/finegrained_fp8.py` (`Fp8Quantize`) and
`integrations/fbgemm_fp8.py`.
"""

import torch

from assay.models.quantization.formats.protocol import Format, per_group, precision_of
from assay.models.quantization.quantized_weight import Grid, Groups, QuantizedWeight
from assay.models.quantization.stored import WeightStore

_BLOCK = "weight_block_size"
_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def _read_blocks(stored: WeightStore, module: str) -> QuantizedWeight:
    """Read `weight` and `weight_scale_inv`, which, despite its name, multiplies the weight."""
    block = stored.quantization.get(_BLOCK)
    shape = stored.shapes.get(f"{module}.weight", ())
    sizes = list(shape) if block is None else block
    if not isinstance(sizes, list | tuple) or len(sizes) != 2 or len(shape) != 2:
        raise stored.refuse_setting(_BLOCK)
    if any(type(size) is not int or size < 1 for size in sizes):
        raise stored.refuse_setting(_BLOCK)
    return _read(stored, module, "weight_scale_inv", (sizes[0], sizes[1]))


def _read_rows(stored: WeightStore, module: str) -> QuantizedWeight:
    """Read `weight` and `weight_scale`, one per row."""
    shape = stored.shapes.get(f"{module}.weight", (0, 0))
    return _read(stored, module, "weight_scale", (1, shape[-1]))


def _read(stored: WeightStore, module: str, scale: str, block: tuple[int, int]) -> QuantizedWeight:
    name = f"{module}.weight"
    data = stored.fetch(name, name, (None, None))
    if data.dtype not in _DTYPES:
        raise stored.refuse(name, f"of dtype {data.dtype} is not fp8")
    groups = Groups((data.shape[0], data.shape[1]), block)
    scales = stored.fetch(f"{module}.{scale}", name)
    return QuantizedWeight(
        codes=data.view(torch.uint8),
        grid=Grid.of_dtype(data.dtype),
        groups=groups,
        scales=per_group(stored, f"{module}.{scale}", scales, groups),
        scale_precision=precision_of(scales),
    )


_ACTIVATIONS = ("activation_scale", "activation_scale_inv", "input_scale", "input_scale_ub")
_INVERSE = "weight_scale_inv"
BLOCKS = Format(_INVERSE, _INVERSE, ("weight", _INVERSE, *_ACTIVATIONS), _read_blocks)
ROWS = Format("weight_scale", "weight_scale", ("weight", "weight_scale", *_ACTIVATIONS), _read_rows)
