"""Canonical names of operations (aten), and pointwise operations."""

import torch
from torch._ops import OpOverload

# Operations that move or create values without rounding.
MOVING = frozenset(
    # As text: forty names in quotes are hard to read.
    """view _unsafe_view reshape _reshape_alias t transpose permute expand slice select unsqueeze
    squeeze cat stack split split_with_sizes chunk unbind clone _to_copy copy_ copy detach alias
    lift_fresh contiguous index_select index gather embedding arange full zeros ones empty
    full_like zeros_like ones_like empty_like new_full new_zeros new_ones new_empty scalar_tensor
    empty_strided new_empty_strided fill_ fill zero_ narrow unfold repeat as_strided where
    masked_fill masked_fill_
    """.split()  # noqa: SIM905
)

ATTENTION = "scaled_dot_product_attention"

# The common name of aten operations that do one computation.
_CANONICAL = {
    "mm": "linear",
    "addmm": "linear",
    "linear": "linear",
    "mkldnn_linear": "linear",
    "_scaled_dot_product_flash_attention_for_cpu": ATTENTION,
    "_scaled_dot_product_flash_attention": ATTENTION,
    "_scaled_dot_product_efficient_attention": ATTENTION,
    "_scaled_dot_product_cudnn_attention": ATTENTION,
    "_scaled_dot_product_attention_math": ATTENTION,
    "_fused_sdp_choice": ATTENTION,
    "bmm": "matmul",
    "baddbmm": "matmul",
    "_softmax": "softmax",
    "_safe_softmax": "softmax",
    "_grouped_mm": "grouped_mm",
}


def operation_name(func: OpOverload) -> str:
    """Return the canonical name of an aten operation: `aten.mm.default` is linear."""
    name: str = func._schema.name.rpartition("::")[2]  # noqa: SLF001 - the public name is the same text
    name = name.rstrip("_") or name
    return _CANONICAL.get(name, name)


def is_pointwise(func: OpOverload) -> bool:
    """Return True if an output element depends on one element of each input, and is rounded once."""
    name = func._schema.name.rpartition("::")[2]  # noqa: SLF001
    return torch.Tag.pointwise in func.tags or name in MOVING or func.is_view
