"""Read quantized weights: a reader for each format, and a table of the formats by `quant_method`.

GPTQ and AWQ: integers packed into 32-bit words, a scale and a zero point per group of inputs.

Sources of the layouts: AutoGPTQ 0.7.1, `qlinear_cuda_old.py` (`pack`, `forward`); GPTQModel 7.7,
`utils/model.py` (what distinguishes `gptq` from `gptq_v2`); AutoAWQ 0.2.9, `modules/linear/gemm.py`.

bitsandbytes: int8 with a scale per row, and nf4 or fp4 in blocks that run through all rows.
Sources of the layouts: bitsandbytes 0.50, `functional.QuantState`, `nn.modules.Linear8bitLt` and
`backends/default/ops.py`.

compressed-tensors, as llm-compressor writes it: integers or floats, packed or plain, any grouping.
Source of the layouts: compressed-tensors 0.20, `compressors/` and `quantization/quant_args.py`. MXFP8 and
MXFP4 store exponents as scales (E8M0, uint8), NVFP4 scales of fp8 that a global scale divides.

fp8 weights with a scale per block or row, as DeepSeek and Transformers' fp8 store them.
Sources of the layouts: Transformers 5.23, `integrations/finegrained_fp8.py` (`Fp8Quantize`) and
`integrations/fbgemm_fp8.py`.

MXFP4 of gpt-oss: experts with a scale of E8M0 per 32 inputs.
Source of the layout: transformers 5.23, `integrations/mxfp4.py`, which transposes the last two dims.

torchao: int8 or fp8 weights with a scale per row, or per group of a row.
Source of the layouts: torchao 0.18, `prototype/safetensors` and `quantization/quantize_/workflows`.
"""

import re
from collections.abc import Mapping
from math import inf, prod

import torch
from torch import Tensor

from assay.errors import UsageError
from assay.files import parse_json
from assay.foreign_text import shorten
from assay.models.quantization.gguf_blocks import GGUF_FORMATS
from assay.models.quantization.quantized_weight import Grid, Groups, InputRounding, QuantizedWeight
from assay.models.quantization.stored_weights import (
    ContradictionError,
    Format,
    WeightStore,
    is_named,
    override_settings,
    packed_width,
    parse_count,
    parse_group_size,
    per_group,
    precision_of,
    require_included,
    unpack_bits,
)

_WORD_BITS = 32
_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_MOST_BITS = range(2, 9)

# AutoAWQ writes output 8 k + _AWQ_ORDER[i] of a word to its i-th 4 bits.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _read_gptq(stored: WeightStore, module: str) -> QuantizedWeight:
    """Read `qweight` [inputs / 32 x bits, outputs], `qzeros`, `scales` [groups, outputs], `g_idx` [inputs]."""
    stored = override_settings(stored, module)
    bits = parse_count(stored, "bits", _MOST_BITS)
    name = f"{module}.qweight"
    packed = stored.fetch(name, name, (None, None))
    index_name = f"{module}.g_idx"
    index = order = None
    if index_name in stored.shapes:
        index = stored.fetch(index_name, index_name, (None,)).long()
    num_rows = packed.shape[1]
    num_columns = len(index) if index is not None else len(packed) * _WORD_BITS // bits
    if len(packed) != packed_width(bits, num_columns):
        problem = f"has {len(packed)} words a column for {num_columns} inputs of {bits} bits"
        raise stored.refuse(name, problem)
    size = parse_group_size(stored, "group_size", num_columns)
    if index is not None:
        order = _order_of(stored, index_name, index, size)
    groups = Groups((num_rows, num_columns), (1, size), order=order)
    num_across = groups.grid_shape[1]
    scales = stored.fetch(f"{module}.scales", name, (num_across, num_rows))
    shape = (num_across, packed_width(bits, num_rows))
    zeros = unpack_bits(stored.fetch(f"{module}.qzeros", name, shape), bits, num_rows)
    if stored.quantization.get("checkpoint_format", "gptq") != "gptq_v2":
        zeros = (zeros + 1) & ((1 << bits) - 1)  # the first version stores them minus one
    codes = unpack_bits(packed.t(), bits, num_columns)
    return _make_packed(codes if order is None else codes[:, order], bits, groups, scales, zeros)


def _make_packed(
    codes: Tensor, bits: int, groups: Groups, scales: Tensor, zeros: Tensor
) -> QuantizedWeight:
    """Return the weight. scales, zeros: groups x outputs."""
    return QuantizedWeight(
        codes=codes,
        grid=Grid.of_unsigned(bits),
        groups=groups,
        scales=scales.t().reshape(-1).float(),
        scale_precision=precision_of(scales),
        stored_zeros=zeros.t().reshape(-1).float(),
    )


def _order_of(stored: WeightStore, name: str, index: Tensor, size: int) -> Tensor | None:
    """Return the columns in the order of their groups; None if they are in order already.

    Raises: UsageError unless all groups except the last have `size` columns.
    """
    expected = torch.arange(len(index)) // size
    if torch.equal(index, expected):
        return None
    order = index.argsort(stable=True)
    if not torch.equal(index[order], expected):
        raise stored.refuse(name, f"does not divide {len(index)} columns into groups of {size}")
    return order


def _read_awq(stored: WeightStore, module: str) -> QuantizedWeight:
    """Read `qweight` [inputs, outputs / 8], `qzeros` [groups, outputs / 8], `scales` [groups, outputs]."""
    stored = override_settings(stored, module)
    settings = stored.quantization
    bits = parse_count(stored, "bits", range(4, 5), settings.get("w_bit"))
    if str(settings.get("version", "gemm")).lower() != "gemm":
        raise stored.refuse_setting("version")
    name = f"{module}.qweight"
    packed = stored.fetch(name, name, (None, None))
    num_columns, num_rows = len(packed), packed.shape[1] * _WORD_BITS // bits
    size = parse_group_size(stored, "group_size", num_columns, settings.get("q_group_size"))
    groups = Groups((num_rows, num_columns), (1, size))
    num_across = groups.grid_shape[1]
    scales = stored.fetch(f"{module}.scales", name, (num_across, num_rows))
    zeros = stored.fetch(f"{module}.qzeros", name, (num_across, packed.shape[1]))
    codes = _unpack_awq(packed).t().contiguous()
    return _make_packed(codes, bits, groups, scales, _unpack_awq(zeros))


def _unpack_awq(packed: Tensor) -> Tensor:
    values = unpack_bits(packed, 4, packed.shape[1] * 8)
    return values.view(len(packed), -1, 8)[:, :, torch.tensor(_AWQ_ORDER).argsort()].flatten(1)


GPTQ = Format("qweight", "scales", ("qweight", "qzeros", "scales", "g_idx"), _read_gptq)
AWQ = Format("qweight", "scales", ("qweight", "qzeros", "scales"), _read_awq)


_INT8_MAX = 127
_QUANT_STATE = "weight.quant_state.bitsandbytes__"
_FOUR_BIT_NAMES = ("nf4", "fp4")
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
        raise stored.refuse(
            f"{module}.{_QUANT_STATE}{kind}", f"has shape {shape} and blocksize {block}"
        )
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
    scales, precision = _read_4bit_scales(stored, module, state)
    return QuantizedWeight(
        codes=filled.view(groups.shape),
        grid=Grid.of_4bit(kind, table),
        groups=groups,
        scales=per_group(stored, f"{name}.absmax", scales, groups),
        scale_precision=precision,
    )


def _read_state(stored: WeightStore, module: str) -> tuple[str, dict[str, object]]:
    for kind in _FOUR_BIT_NAMES:
        name = f"{module}.{_QUANT_STATE}{kind}"
        if name in stored.shapes:
            text = bytes(stored.fetch(name, name, (None,)).to(torch.uint8).tolist())
            state = parse_json(text.decode(errors="replace"), str(stored.files.get(name, name)))
            if not isinstance(state, dict):
                raise stored.refuse(name, "is not a table")
            return kind, state
    raise stored.refuse(
        f"{module}.weight", f"is quantized, but {_QUANT_STATE}nf4 or fp4 is missing"
    )


def _read_4bit_scales(
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
        raise stored.refuse(f"{module}.{_QUANT_STATE}", problem)
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


def _int8_inputs(stored: WeightStore, _module: str) -> InputRounding:
    threshold = stored.quantization.get("llm_int8_threshold")
    largest = float(threshold) if isinstance(threshold, int | float) and threshold else inf
    return InputRounding(Grid.of_signed(-_INT8_MAX, _INT8_MAX), largest_rounded=largest)


INT8 = Format("SCB", "SCB", ("weight", "SCB", "weight_format"), _read_int8, _int8_inputs)
FOUR_BITS = Format(
    "weight.absmax",
    "weight.absmax",
    (
        "weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax",
        "weight.nested_quant_map", *(f"{_QUANT_STATE}{kind}" for kind in _FOUR_BIT_NAMES),
    ),
    _read_4bit,
)  # fmt: skip


_CONFIG_GROUPS = "config_groups"
_FP4_BITS = 4
_NVFP4_GROUP = 16


def _read_compressed(stored: WeightStore, module: str) -> QuantizedWeight:
    """Read a module: `weight_packed` and for integers `weight_shape`, or `weight`; scales, zero points."""
    settings = _settings_of(stored, module)
    bits, kind = settings.get("num_bits", 8), settings.get("type", "int")
    if type(bits) is not int or bits not in range(2, 9) or kind not in ("int", "float"):
        raise stored.refuse_setting(_CONFIG_GROUPS)
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
    scales, precision = _read_compressed_scales(stored, module, name)
    return QuantizedWeight(
        codes=codes,
        grid=grid,
        groups=groups,
        scales=per_group(stored, f"{module}.weight_scale", scales, groups),
        scale_precision=precision,
        stored_zeros=_read_compressed_zeros(stored, module, name, settings, grid, groups),
        middle=float(middle) if is_packed and grid.is_integer else 0.0,
    )


def _read_compressed_scales(stored: WeightStore, module: str, owner: str) -> tuple[Tensor, float]:
    """Return the scales, divided by the weight's global scale, and their relative precision."""
    scales = stored.fetch(f"{module}.weight_scale", owner)
    precision = precision_of(scales)
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    global_scale = f"{module}.weight_global_scale"
    if global_scale in stored.shapes:
        return scales.float() / stored.fetch(global_scale, owner, (1,)).float(), precision
    return scales, precision


def _read_compressed_zeros(
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
    """Return the settings of the weights of a module."""
    if "data_type" in stored.quantization:  # auto-round
        kind = "float" if "fp" in str(stored.quantization["data_type"]) else "int"
        one = override_settings(stored, module).quantization
        return {"type": kind, "num_bits": one.get("bits"), "group_size": one.get("group_size")}
    weights = _group_of(stored, module).get("weights")
    if not isinstance(weights, dict):
        raise stored.refuse_setting(_CONFIG_GROUPS)
    return weights


def _group_of(stored: WeightStore, module: str) -> Mapping[str, object]:
    """Return the group of the most specific target: a name, a pattern (`re:`), a class.

    Of equal targets the later group counts, of several patterns or classes the first in order of text
    (compressed-tensors 0.20, `utils/match.py`).
    """
    groups = stored.quantization.get(_CONFIG_GROUPS)
    if not isinstance(groups, dict):
        raise stored.refuse_setting(_CONFIG_GROUPS)
    of_target: dict[str, Mapping[str, object]] = {}
    for group in groups.values():
        if not isinstance(group, dict):
            raise stored.refuse_setting(_CONFIG_GROUPS)
        targets = group.get("targets")
        of_target |= {str(one): group for one in (targets if isinstance(targets, list) else ())}
    names = sorted(
        (one for one in of_target if is_named(one, module)),
        key=lambda one: (one.startswith("re:"), one),
    )
    classes = sorted(one for one in of_target if one[:1].isupper())
    for target in [*names, *classes]:
        if isinstance(of_target[target].get("weights"), dict):
            return of_target[target]
    raise stored.refuse(
        module, f"is quantized, but quantization_config.{_CONFIG_GROUPS} does not name it"
    )


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
        raise stored.refuse_setting(_CONFIG_GROUPS)
    rows, columns = sizes
    if type(rows) is not int or type(columns) is not int or rows < 1 or columns < 1:
        raise stored.refuse_setting(_CONFIG_GROUPS)
    return rows, columns


def _compressed_inputs(stored: WeightStore, module: str) -> InputRounding | None:
    if "data_type" in stored.quantization:  # auto-round
        one = override_settings(stored, module).quantization
        kind = "float" if "fp" in str(one.get("act_data_type")) else "int"
        bits, size = one.get("act_bits"), one.get("act_group_size")
        settings: object = {"num_bits": bits, "type": kind, "group_size": size}
    else:
        settings = _group_of(stored, module).get("input_activations")
    if not isinstance(settings, dict):
        return None
    bits, size = settings.get("num_bits"), settings.get("group_size")
    group = size if isinstance(size, int) and size > 0 else None
    if settings.get("strategy") == "tensor":
        group = 0
    if not isinstance(bits, int) or bits not in _MOST_BITS:
        return None
    if settings.get("type") == "int":
        half = 1 << (bits - 1)
        return InputRounding(Grid.of_signed(-half, half - 1), group)
    scales = torch.float8_e4m3fn if group == _NVFP4_GROUP else None
    grid = Grid.of_e2m1() if bits == _FP4_BITS else Grid.of_dtype(torch.float8_e4m3fn)
    return InputRounding(grid, group, scale_dtype=scales)


# Other tensors of a quantized module, for activations and caches.
_OTHERS = tuple(
    f"{kind}_{what}" for kind in ("input", "output", "k", "v", "q")
    for what in ("scale", "zero_point", "global_scale")
)  # fmt: skip

_COMPRESSED_PARTS = (
    "weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point",
    "weight_global_scale", *_OTHERS,
)  # fmt: skip
COMPRESSED_TENSORS = Format(
    "weight_scale", "weight_scale", _COMPRESSED_PARTS, _read_compressed, _compressed_inputs
)


_BLOCK = "weight_block_size"
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def _read_blocks(stored: WeightStore, module: str) -> QuantizedWeight:
    """Read `weight` and `weight_scale_inv`, which, despite its name, multiplies the weight."""
    block = stored.quantization.get(_BLOCK)
    shape = stored.shapes.get(f"{module}.weight", ())
    sizes = list(shape) if block is None else block
    if not isinstance(sizes, list | tuple) or len(sizes) != 2 or len(shape) != 2:
        raise stored.refuse_setting(_BLOCK)
    if any(type(size) is not int or size < 1 for size in sizes):
        raise stored.refuse_setting(_BLOCK)
    return _read_fp8(stored, module, "weight_scale_inv", (sizes[0], sizes[1]))


def _read_rows(stored: WeightStore, module: str) -> QuantizedWeight:
    """Read `weight` and `weight_scale`, one per row."""
    shape = stored.shapes.get(f"{module}.weight", (0, 0))
    return _read_fp8(stored, module, "weight_scale", (1, shape[-1]))


def _read_fp8(
    stored: WeightStore, module: str, scale: str, block: tuple[int, int]
) -> QuantizedWeight:
    name = f"{module}.weight"
    data = stored.fetch(name, name, (None, None))
    if data.dtype not in _FP8:
        raise stored.refuse(name, f"of dtype {data.dtype} is not fp8")
    groups = Groups((data.shape[0], data.shape[1]), block)
    return _make_plain(stored, name, f"{module}.{scale}", data, Grid.of_dtype(data.dtype), groups)


_ACTIVATIONS = ("activation_scale", "activation_scale_inv", "input_scale", "input_scale_ub")
_INVERSE = "weight_scale_inv"
FP8_BLOCKS = Format(_INVERSE, _INVERSE, ("weight", _INVERSE, *_ACTIVATIONS), _read_blocks)
FP8_ROWS = Format(
    "weight_scale", "weight_scale", ("weight", "weight_scale", *_ACTIVATIONS), _read_rows
)


_CODES, _SCALES, _ZEROS = "_weight_qdata", "_weight_scale", "_weight_zero_point"


def _read_torchao(stored: WeightStore, module: str) -> QuantizedWeight:
    """Read `_weight_qdata` [outputs, inputs], `_weight_scale` and `_weight_zero_point` [outputs, groups]."""
    name = f"{module}.{_CODES}"
    data = stored.fetch(name, name, (None, None))
    if data.dtype == torch.int8:
        target = str(_torchao_facts(stored, module).get("target_dtype"))
        bits = next((one for one in _MOST_BITS if f"'int{one}'" in target), 8)
        grid = Grid.of_signed(-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    elif data.dtype == torch.float8_e4m3fn:
        grid = Grid.of_dtype(data.dtype)
    else:
        raise stored.refuse(name, f"of dtype {data.dtype} is neither int8 nor fp8")
    scales = stored.fetch(f"{module}.{_SCALES}", name, (None, None))
    rows, columns = data.shape
    down, across = (max(1, size) for size in scales.shape)
    if rows % down or columns % across:
        raise stored.refuse(f"{module}.{_SCALES}", f"does not divide {rows} x {columns} values")
    groups = Groups((rows, columns), (rows // down, columns // across))
    zeros = None
    if grid.is_integer and f"{module}.{_ZEROS}" in stored.shapes:
        points = stored.fetch(f"{module}.{_ZEROS}", name, (down, across))
        zeros = per_group(stored, f"{module}.{_ZEROS}", points, groups)
    return _make_plain(stored, name, f"{module}.{_SCALES}", data, grid, groups, zeros)


def _torchao_facts(stored: WeightStore, module: str) -> Mapping[str, object]:
    """Return the attributes of the tensor that torchao saved, which it describes in the metadata of its file."""
    name = f"{module}.weight"
    if name not in stored.metadata:
        return {}
    facts = parse_json(stored.metadata[name], f"{stored.origin}, metadata of {name}")
    data = facts.get("_data") if isinstance(facts, dict) else None
    if not isinstance(data, dict):
        raise stored.refuse(name, "has metadata without _data")
    return data


def _torchao_inputs(stored: WeightStore, module: str) -> InputRounding | None:
    facts = _torchao_facts(stored, module)
    kind = str(facts.get("act_quant_kwargs") or facts.get("activation_quantization") or "").lower()
    group = 0 if "pertensor" in kind else None
    if "int8" in kind:
        return InputRounding(Grid.of_signed(-128, 127), group)
    return InputRounding(Grid.of_dtype(torch.float8_e4m3fn), group) if "float8" in kind else None


def _make_plain(
    stored: WeightStore, owner: str, scales_name: str, data: Tensor, grid: Grid, groups: Groups,
    zeros: Tensor | None = None,
) -> QuantizedWeight:  # fmt: skip
    """Return a weight with a byte for each code."""
    scales = stored.fetch(scales_name, owner)
    return QuantizedWeight(
        codes=data.view(torch.uint8),
        grid=grid,
        groups=groups,
        scales=per_group(stored, scales_name, scales, groups),
        scale_precision=precision_of(scales),
        stored_zeros=zeros,
    )


TORCHAO = Format(_CODES, _SCALES, (_CODES, _SCALES, _ZEROS), _read_torchao, _torchao_inputs)


def _read_experts(stored: WeightStore, name: str) -> QuantizedWeight:
    """Read `NAME_blocks` [experts, outputs, groups, 16 bytes] and `NAME_scales` (E8M0) as rows of all experts."""
    blocks = stored.fetch(f"{name}_blocks", name, (None, None, None, _MX_GROUP // 2))
    scales = stored.fetch(f"{name}_scales", name, tuple(blocks.shape[:-1]))
    packed = blocks.flatten(0, 1).flatten(1)
    shape = (len(packed), 2 * packed.shape[1])
    groups = Groups(shape, (1, _MX_GROUP))
    values = torch.exp2(scales.float() - _E8M0_BIAS)
    return QuantizedWeight(
        codes=unpack_bits(packed, _FP4_BITS, shape[1]),
        grid=Grid.of_e2m1(),
        groups=groups,
        scales=per_group(stored, f"{name}_scales", values, groups),
        scale_precision=0.0,
    )


_MX_GROUP = 32
_E8M0_BIAS = 127
# Its parts are `NAME_blocks`, not `NAME.blocks`, for a weight `NAME` of all experts [experts, inputs, outputs].
MXFP4_EXPERTS = Format("_blocks", "_scales", ("_blocks", "_scales"), _read_experts)


_FORMATS: dict[str, tuple[Format, ...]] = {
    "awq": (AWQ,),
    "bitsandbytes": (FOUR_BITS, INT8),
    "compressed-tensors": (COMPRESSED_TENSORS,),
    "fbgemm_fp8": (FP8_ROWS,),
    "fp8": (FP8_BLOCKS,),
    "gguf": GGUF_FORMATS,
    "gptq": (GPTQ,),
    "mxfp4": (MXFP4_EXPERTS,),
    "torchao": (TORCHAO,),
    # auto-round 0.16 names the layout in `packing_format`.
    "auto_round:auto_gptq": (GPTQ,),
    "auto_round:auto_awq": (AWQ,),
    "auto_round:fp8": (FP8_BLOCKS,),
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
        joint, kind = ("", "") if one is MXFP4_EXPERTS else (".", ".weight")
        for name in stored.shapes:
            module = name.removesuffix(f"{joint}{one.marker}")
            if module != name:
                found[f"{module}{kind}"] = one
                parts |= {f"{module}{joint}{part}" for part in one.parts}
    return found | {name: None for name in stored.shapes if name not in parts}


def find_left_out(stored: WeightStore, weights: Mapping[str, Format | None]) -> list[str]:
    """Describe float weights whose like is quantized in other layers, though no setting excludes them."""
    if _method_of(stored) == "gguf":
        return []  # each tensor has its own type
    quantized = {_LAYER_NUMBER.sub("*", name) for name, one in weights.items() if one is not None}
    found = []
    for name, form in weights.items():
        if form is None and _LAYER_NUMBER.sub("*", name) in quantized:
            module = name.removesuffix(".weight")
            try:
                require_included(stored, module)
                settings = override_settings(stored, module).quantization
                if settings.get("quant_method") == "compressed-tensors":
                    _group_of(stored, module)
            except (ContradictionError, UsageError):
                continue
            bits = settings.get("bits")
            is_named_apart = module in str(settings.get("quant_type"))
            if not is_named_apart and not (isinstance(bits, int) and bits not in _MOST_BITS):
                found.append(f"{name} (float, though it is quantized in other layers)")
    return found


def count_groups(stored: WeightStore, weights: Mapping[str, Format | None]) -> int:
    """Count the scales of all quantized weights without reading them."""
    return sum(
        prod(stored.shapes.get(f"{name.removesuffix('weight')}{one.scales}", ()))
        for name, one in weights.items()
        if one is not None
    )
