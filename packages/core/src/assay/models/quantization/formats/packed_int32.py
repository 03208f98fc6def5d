"""GPTQ and AWQ: integers packed into 32-bit words, a scale and a zero point per group of inputs.

Sources of the layouts: AutoGPTQ 0.7.1, `qlinear_cuda_old.py` (`pack`, `forward`); GPTQModel 7.7,
`utils/model.py` (what distinguishes `gptq` from `gptq_v2`); AutoAWQ 0.2.9, `modules/linear/gemm.py`.
"""

import torch
from torch import Tensor

from assay.models.quantization.formats.protocol import (
    Format,
    override_settings,
    packed_width,
    parse_count,
    parse_group_size,
    precision_of,
    unpack_bits,
)
from assay.models.quantization.quantized_weight import Grid, Groups, QuantizedWeight
from assay.models.quantization.stored import WeightStore

_WORD_BITS = 32
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
    return _make(codes if order is None else codes[:, order], bits, groups, scales, zeros)


def _make(
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
    return _make(codes, bits, groups, scales, _unpack_awq(zeros))


def _unpack_awq(packed: Tensor) -> Tensor:
    values = unpack_bits(packed, 4, packed.shape[1] * 8)
    return values.view(len(packed), -1, 8)[:, :, torch.tensor(_AWQ_ORDER).argsort()].flatten(1)


GPTQ = Format("qweight", "scales", ("qweight", "qzeros", "scales", "g_idx"), _read_gptq)
AWQ = Format("qweight", "scales", ("qweight", "qzeros", "scales"), _read_awq)
