"""compressed-tensors, as llm-compressor writes it: integers or fp8, packed or plain, any grouping.

Source of the layouts: compressed-tensors 0.20, `compressors/pack_quantized`, `compressors/naive_quantized`
and `quantization/quant_args.py`.
"""

import re
from collections.abc import Mapping

import torch

from assay.models.quantization.formats.protocol import (
    Format,
    packed_width,
    per_group,
    precision_of,
    unpack_bits,
)
from assay.models.quantization.quantized_weight import Grid, Groups, QuantizedWeight
from assay.models.quantization.stored import WeightStore

_GROUPS = "config_groups"


def _read(stored: WeightStore, module: str) -> QuantizedWeight:
    """Read a module: `weight_packed` and `weight_shape`, or `weight`; `weight_scale`, `weight_zero_point`."""
    settings = _settings_of(stored, module)
    bits, kind = settings.get("num_bits", 8), settings.get("type", "int")
    if type(bits) is not int or bits not in range(2, 9) or kind not in ("int", "float"):
        raise stored.refuse_setting(_GROUPS)
    is_packed = f"{module}.weight_packed" in stored.shapes
    name = f"{module}.weight_packed" if is_packed else f"{module}.weight"
    data = stored.fetch(name, name, (None, None))
    shape = (data.shape[0], data.shape[1])
    if is_packed:
        sizes = stored.fetch(f"{module}.weight_shape", name, (2,)).long().tolist()
        shape = (sizes[0], sizes[1])
        if data.shape != (shape[0], packed_width(bits, shape[1])):
            problem = f"has the shape {list(data.shape)} for {list(shape)} values of {bits} bits"
            raise stored.refuse(name, problem)
    groups = Groups(shape, _block_of(stored, settings, shape))
    scales = stored.fetch(f"{module}.weight_scale", name)
    middle = 1 << (bits - 1)
    if is_packed:
        grid, codes = Grid.of_unsigned(bits), unpack_bits(data, bits, shape[1])
    elif kind == "float" and data.dtype == torch.float8_e4m3fn:
        grid, codes = Grid.of_dtype(data.dtype), data.view(torch.uint8)
    elif kind == "int" and data.dtype == torch.int8:
        grid, codes = Grid.of_signed(-middle, middle - 1), data.view(torch.uint8)
    else:
        raise stored.refuse(name, f"of dtype {data.dtype} does not hold {kind}{bits}")
    zeros = None
    zero_name = f"{module}.weight_zero_point"
    if zero_name in stored.shapes and grid.is_integer:
        points = stored.fetch(zero_name, name)
        if is_packed:  # packed down the rows, and shifted like the codes
            wanted = (packed_width(bits, shape[0]), groups.grid_shape[1])
            points = stored.fetch(zero_name, name, wanted)
            points = unpack_bits(points.t(), bits, shape[0]).t()
        zeros = per_group(stored, zero_name, points, groups)
    elif settings.get("symmetric", True) is not True and grid.is_integer:
        stored.fetch(zero_name, name)  # raises because it is missing
    return QuantizedWeight(
        codes=codes,
        grid=grid,
        groups=groups,
        scales=per_group(stored, f"{module}.weight_scale", scales, groups),
        scale_precision=precision_of(scales),
        stored_zeros=zeros,
        middle=float(middle) if is_packed else 0.0,
    )


def _settings_of(stored: WeightStore, module: str) -> Mapping[str, object]:
    """Return the weight settings of the first group whose targets include the module."""
    groups = stored.quantization.get(_GROUPS)
    if not isinstance(groups, dict):
        raise stored.refuse_setting(_GROUPS)
    for group in groups.values():
        if not isinstance(group, dict):
            raise stored.refuse_setting(_GROUPS)
        weights, targets = group.get("weights"), group.get("targets")
        names = targets if isinstance(targets, list) else []
        if isinstance(weights, dict) and any(_is_target(str(one), module) for one in names):
            return weights
    raise stored.refuse(module, f"is quantized, but quantization_config.{_GROUPS} does not name it")


def _is_target(target: str, module: str) -> bool:
    """Return True for a class, or for the module's name in full or as a pattern (`re:`)."""
    if target.startswith("re:"):
        try:
            return re.match(target.removeprefix("re:"), module) is not None
        except re.error:
            return False
    return target == module or target[:1].isupper()


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
    sizes = [1, size] if strategy == "group" else block if strategy == "block" else None
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

_PARTS = ("weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", *_OTHERS)
COMPRESSED_TENSORS = Format("weight_scale", "weight_scale", _PARTS, _read)
