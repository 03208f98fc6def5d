"""bitsandbytes: int8 with a scale per row, and nf4 or fp4 in blocks that run through all rows.

Sources of the layouts: bitsandbytes 0.50, `functional.QuantState`, `nn.modules.Linear8bitLt` and
`backends/default/ops.py`.
"""

import torch
from torch import Tensor

from assay.files import parse_json
from assay.models.quantization.formats.protocol import Format, per_group, precision_of
from assay.models.quantization.quantized_weight import Grid, Groups, QuantizedWeight
from assay.models.quantization.stored import WeightStore

_INT8_MAX = 127
_STATE = "weight.quant_state.bitsandbytes__"
_NAMES = ("nf4", "fp4")
_MOST_IN_BLOCK = 4096  # the limit of the library; padding larger blocks would take memory


def _read_int8(stored: WeightStore, module: str) -> QuantizedWeight:
    """Read `weight` int8 [outputs, inputs] and `SCB` [outputs], the largest value of each row."""
    name = f"{module}.weight"
    data = stored.fetch(name, name, (None, None))
    if data.dtype != torch.int8:
        raise stored.refuse(name, f"of dtype {data.dtype} is not int8")
    groups = Groups((data.shape[0], data.shape[1]), (1, data.shape[1]))
    scales = stored.fetch(f"{module}.SCB", name, (len(data),))
    return QuantizedWeight(
        codes=data.view(torch.uint8),
        grid=Grid.of_signed(-_INT8_MAX, _INT8_MAX),
        groups=groups,
        scales=scales.float() / _INT8_MAX,
        scale_precision=precision_of(scales),
    )


def _read_4bit(stored: WeightStore, module: str) -> QuantizedWeight:
    """Read `weight`, two codes per byte with the first in the upper half, and its `quant_state`."""
    name = f"{module}.weight"
    kind, state = _read_state(stored, module)
    shape, block = state.get("shape"), state.get("blocksize")
    sizes = shape if isinstance(shape, list) and len(shape) == 2 else [0]
    is_block = type(block) is int and block in range(1, _MOST_IN_BLOCK + 1)
    if not is_block or any(type(size) is not int or size < 1 for size in sizes):
        raise stored.refuse(f"{module}.{_STATE}{kind}", f"has shape {shape} and blocksize {block}")
    rows, columns = sizes
    packed = stored.fetch(name, name).contiguous().reshape(-1).view(torch.uint8)
    if len(packed) != -(-rows * columns // 2):
        raise stored.refuse(
            name, f"has {len(packed)} bytes for {rows} x {columns} values of 4 bits"
        )
    groups = Groups((rows, columns), (1, int(str(block))), is_flat=True)
    codes = torch.stack((packed >> 4, packed & 15), 1).flatten()[: rows * columns]
    filled = torch.nn.functional.pad(codes, (0, groups.shape[0] * groups.shape[1] - len(codes)))
    table = stored.fetch(f"{name}.quant_map", name, (16,))
    scales, precision = _read_scales(stored, module, state)
    return QuantizedWeight(
        codes=filled.view(groups.shape),
        grid=Grid.of_4bit(kind, table),
        groups=groups,
        scales=per_group(stored, f"{name}.absmax", scales, groups),
        scale_precision=precision,
    )


def _read_state(stored: WeightStore, module: str) -> tuple[str, dict[str, object]]:
    for kind in _NAMES:
        name = f"{module}.{_STATE}{kind}"
        if name in stored.shapes:
            text = bytes(stored.fetch(name, name, (None,)).to(torch.uint8).tolist())
            state = parse_json(text.decode(errors="replace"), str(stored.files.get(name, name)))
            if not isinstance(state, dict):
                raise stored.refuse(name, "is not a table")
            return kind, state
    raise stored.refuse(f"{module}.weight", f"is quantized, but {_STATE}nf4 or fp4 is missing")


def _read_scales(
    stored: WeightStore, module: str, state: dict[str, object]
) -> tuple[Tensor, float | Tensor]:
    """Return the scale of each block and its relative precision.

    Scales may be quantized too: 8 bits by `nested_quant_map`, in blocks, after subtracting the mean.
    """
    name = f"{module}.weight"
    absmax = stored.fetch(f"{name}.absmax", name)
    if absmax.is_floating_point():
        return absmax, precision_of(absmax)
    size, mean = state.get("nested_blocksize"), state.get("nested_offset")
    if type(size) is not int or size < 1 or not isinstance(mean, int | float):
        problem = f"has nested_blocksize {size} and nested_offset {mean}"
        raise stored.refuse(f"{module}.{_STATE}", problem)
    table = stored.fetch(f"{name}.nested_quant_map", name, (256,)).float()
    codes = absmax.reshape(-1).int()
    outer = stored.fetch(f"{name}.nested_absmax", name, (-(-len(codes) // size),)).float()
    scales = table[codes] * outer.repeat_interleave(size)[: len(codes)] + float(mean)
    levels = table.sort().values
    middles = (levels[1:] + levels[:-1]) / 2
    above = torch.bucketize(table[codes], middles)
    widths = torch.nn.functional.pad(levels.diff(), (1, 1)).unfold(0, 2, 1).amax(1)
    half_steps = widths[above] / 2 * outer.repeat_interleave(size)[: len(codes)]
    return scales, half_steps / scales.abs().clamp(min=1e-38)


INT8 = Format("SCB", "SCB", ("weight", "SCB", "weight_format"), _read_int8)
FOUR_BITS = Format(
    "weight.absmax",
    "weight.absmax",
    (
        "weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax",
        "weight.nested_quant_map", *(f"{_STATE}{kind}" for kind in _NAMES),
    ),
    _read_4bit,
)  # fmt: skip
