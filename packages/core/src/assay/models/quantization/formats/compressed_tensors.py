"""compressed-tensors, as llm-compressor writes it: integers or floats, packed or plain, any grouping.

Source of the layouts: compressed-tensors 0.20, `compressors/` and `quantization/quant_args.py`. MXFP8 and
MXFP4 store exponents as scales (E8M0, uint8), NVFP4 scales of fp8 that a global scale divides.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from assay.models.quantization.formats.protocol import (
    Format,
    override_settings,
    packed_width,
    per_group,
    precision_of,
    unpack_bits,
)
from assay.models.quantization.quantized_weight import Grid, Groups, QuantizedWeight
from assay.models.quantization.stored import WeightStore

_GROUPS = "config_groups"
_FP4_BITS = 4


def _read(stored: WeightStore, module: str) -> QuantizedWeight:
    """Read a module: `weight_packed` and for integers `weight_shape`, or `weight`; scales, zero points."""
    settings = _settings_of(stored, module)
    bits, kind = settings.get("num_bits", 8), settings.get("type", "int")
    if type(bits) is not int or bits not in range(2, 9) or kind not in ("int", "float"):
        raise stored.refuse_setting(_GROUPS)
    is_packed = f"{module}.weight_packed" in stored.shapes
    name = f"{module}.weight_packed" if is_packed else f"{module}.weight"
    data = stored.fetch(name, name, (None, None))
    shape = (data.shape[0], data.shape[1])
    middle = 1 << (bits - 1)
    if is_packed and kind == "float":
        if (bits, data.dtype) != (_FP4_BITS, torch.uint8):
            raise stored.refuse(name, f"of dtype {data.dtype} does not hold float{bits}")
        shape = (shape[0], 2 * shape[1])
        grid, codes = Grid.of_e2m1(), unpack_bits(data, bits, shape[1])
    elif is_packed:
        sizes = stored.fetch(f"{module}.weight_shape", name, (2,)).long().tolist()
        shape = (sizes[0], sizes[1])
        if data.shape != (shape[0], packed_width(bits, shape[1])):
            problem = f"has the shape {list(data.shape)} for {list(shape)} values of {bits} bits"
            raise stored.refuse(name, problem)
        grid, codes = Grid.of_unsigned(bits), unpack_bits(data, bits, shape[1])
    elif kind == "float" and data.dtype == torch.float8_e4m3fn:
        grid, codes = Grid.of_dtype(data.dtype), data.view(torch.uint8)
    elif kind == "int" and data.dtype == torch.int8:
        grid, codes = Grid.of_signed(-middle, middle - 1), data.view(torch.uint8)
    else:
        raise stored.refuse(name, f"of dtype {data.dtype} does not hold {kind}{bits}")
    groups = Groups(shape, _block_of(stored, settings, shape))
    scales, precision = _read_scales(stored, module, name)
    return QuantizedWeight(
        codes=codes,
        grid=grid,
        groups=groups,
        scales=per_group(stored, f"{module}.weight_scale", scales, groups),
        scale_precision=precision,
        stored_zeros=_read_zeros(stored, module, name, settings, grid, groups),
        middle=float(middle) if is_packed and grid.is_integer else 0.0,
    )


def _read_scales(stored: WeightStore, module: str, owner: str) -> tuple[Tensor, float]:
    """Return the scales, divided by the weight's global scale, and their relative precision."""
    scales = stored.fetch(f"{module}.weight_scale", owner)
    precision = precision_of(scales)
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    global_scale = f"{module}.weight_global_scale"
    if global_scale in stored.shapes:
        return scales.float() / stored.fetch(global_scale, owner, (1,)).float(), precision
    return scales, precision


def _read_zeros(
    stored: WeightStore, module: str, owner: str, settings: Mapping[str, object], grid: Grid,
    groups: Groups,
) -> Tensor | None:  # fmt: skip
    name = f"{module}.weight_zero_point"
    if not grid.is_integer:
        return None
    if name not in stored.shapes:
        if settings.get("symmetric", True) is not True:
            stored.fetch(name, owner)  # raises because it is missing
        return None
    points = stored.fetch(name, name)
    bits = settings.get("num_bits", 8)
    if points.dtype == torch.int32 and isinstance(
        bits, int
    ):  # packed down the rows, shifted like the codes
        rows = groups.grid_shape[0]
        points = stored.fetch(name, name, (packed_width(bits, rows), groups.grid_shape[1]))
        points = unpack_bits(points.t(), bits, rows).t()
    elif grid.levels[0] >= 0:  # plain, of packed codes
        points = points.float() + float(1 << (int(str(bits)) - 1))
    return per_group(stored, name, points, groups)


def _settings_of(stored: WeightStore, module: str) -> Mapping[str, object]:
    """Return the weight settings of the most specific target: a name, a pattern (`re:`), a class.

    Of equal targets the later group counts, of several patterns or classes the first in order of text
    (compressed-tensors 0.20, `utils/match.py`).
    """
    if "data_type" in stored.quantization:  # auto-round
        kind = "float" if "fp" in str(stored.quantization["data_type"]) else "int"
        one = override_settings(stored, module).quantization
        return {"type": kind, "num_bits": one.get("bits"), "group_size": one.get("group_size")}
    groups = stored.quantization.get(_GROUPS)
    if not isinstance(groups, dict):
        raise stored.refuse_setting(_GROUPS)
    of_target: dict[str, Mapping[str, object]] = {}
    for group in groups.values():
        if not isinstance(group, dict):
            raise stored.refuse_setting(_GROUPS)
        targets = group.get("targets")
        of_target |= {str(one): group for one in (targets if isinstance(targets, list) else ())}
    names = sorted((one for one in of_target if _is_named(one, module)), key=_by_precedence)
    classes = sorted(one for one in of_target if one[:1].isupper())
    for target in [*names, *classes]:
        weights = of_target[target].get("weights")
        if isinstance(weights, dict):
            return weights
    raise stored.refuse(module, f"is quantized, but quantization_config.{_GROUPS} does not name it")


def _by_precedence(target: str) -> tuple[bool, str]:
    return target.startswith("re:"), target


def _is_named(target: str, module: str) -> bool:
    """Return True for the module's name, in full or as a pattern."""
    if target.startswith("re:"):
        try:
            return re.match(target.removeprefix("re:"), module) is not None
        except re.error:
            return False
    return target == module


def _block_of(
    stored: WeightStore, settings: Mapping[str, object], shape: tuple[int, int]
) -> tuple[int, int]:
    size, block = settings.get("group_size"), settings.get("block_structure")
    strategy = settings.get("strategy") or (
        "tensor" if size is None else "channel" if size == -1 else "group"
    )
    if strategy == "tensor":
        return shape
    if strategy == "channel":
        return 1, shape[1]
    sizes = (
        [1, size]
        if strategy in ("group", "tensor_group")
        else block
        if strategy == "block"
        else None
    )
    if not isinstance(sizes, list) or len(sizes) != 2:
        raise stored.refuse_setting(_GROUPS)
    rows, columns = sizes
    if type(rows) is not int or type(columns) is not int or rows < 1 or columns < 1:
        raise stored.refuse_setting(_GROUPS)
    return rows, columns


# Other tensors of a quantized module, for activations and caches.
_OTHERS = tuple(
    f"{kind}_{what}" for kind in ("input", "output", "k", "v", "q")
    for what in ("scale", "zero_point", "global_scale")
)  # fmt: skip

_PARTS = (
    "weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point",
    "weight_global_scale", *_OTHERS,
)  # fmt: skip
COMPRESSED_TENSORS = Format("weight_scale", "weight_scale", _PARTS, _read)
