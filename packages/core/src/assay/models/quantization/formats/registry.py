"""Formats by `quantization_config.quant_method` of a model's config.json."""

from collections.abc import Mapping
from math import prod

from assay.errors import UsageError
from assay.foreign_text import shorten
from assay.models.quantization.formats import bitsandbytes, fp8
from assay.models.quantization.formats.compressed_tensors import COMPRESSED_TENSORS
from assay.models.quantization.formats.packed_int32 import AWQ, GPTQ
from assay.models.quantization.formats.protocol import Format
from assay.models.quantization.formats.torchao import TORCHAO
from assay.models.quantization.stored import WeightStore

_FORMATS: dict[str, tuple[Format, ...]] = {
    "awq": (AWQ,),
    "bitsandbytes": (bitsandbytes.FOUR_BITS, bitsandbytes.INT8),
    "compressed-tensors": (COMPRESSED_TENSORS,),
    "fbgemm_fp8": (fp8.ROWS,),
    "fp8": (fp8.BLOCKS,),
    "gptq": (GPTQ,),
    "torchao": (TORCHAO,),
    # auto-round 0.16 names the layout in `packing_format`.
    "auto_round:auto_gptq": (GPTQ,),
    "auto_round:auto_awq": (AWQ,),
    "auto_round:fp8": (fp8.BLOCKS,),
    "auto_round:llm_compressor": (COMPRESSED_TENSORS,),
}


def has_known_format(stored: WeightStore) -> bool:
    """Return True for a known quantization method."""
    return _method_of(stored) in _FORMATS


def _method_of(stored: WeightStore) -> str:
    method = str(stored.quantization.get("quant_method"))
    return str(stored.quantization.get("packing_format")) if method == "auto-round" else method


def _formats_of(stored: WeightStore) -> tuple[Format, ...]:
    """Return the possible formats of weights; none without quantization.

    Raises: UsageError for an unknown method.
    """
    method = _method_of(stored)
    if not stored.quantization:
        return ()
    if not has_known_format(stored):
        raise UsageError(
            f"{stored.origin}: the quantization method {shorten(method)} cannot be read;"
            f" known methods: {', '.join(_FORMATS)}"
        )
    return _FORMATS[method]


def list_weights(stored: WeightStore) -> dict[str, Format | None]:
    """Return every weight with its format, or None if it is not quantized."""
    found: dict[str, Format | None] = {}
    parts: set[str] = set()
    for one in _formats_of(stored):
        for name in stored.shapes:
            module = name.removesuffix(f".{one.marker}")
            if module != name:
                found[f"{module}.weight"] = one
                parts |= {f"{module}.{part}" for part in one.parts}
    return found | {name: None for name in stored.shapes if name not in parts}


def count_groups(stored: WeightStore, weights: Mapping[str, Format | None]) -> int:
    """Count the scales of all quantized weights without reading them."""
    return sum(
        prod(stored.shapes.get(f"{name.removesuffix('weight')}{one.scales}", ()))
        for name, one in weights.items()
        if one is not None
    )
