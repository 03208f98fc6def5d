"""Attention masks, compared by the pairs that they allow, in any form."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import torch
from torch import Tensor, nn

from assay.sites import RowMap

# Attention implementations whose masks are complete. Others (flash, flex) get padding and window by
# other arguments; their masks are neither compared nor replaced, and the result of attention is judged.
COMPARABLE_IMPLEMENTATIONS = frozenset({"eager", "sdpa"})


def is_attention_mask(port: str, expected: Tensor) -> bool:
    """Return True if the tensor at `port` only states which keys each query may see.

    An additive mask contains zeros and lowest numbers only; biases by distance are values.
    """
    if not _is_named_mask(port) or expected.ndim != 4:
        return False
    return not expected.is_floating_point() or bool(((expected == 0) | ~allowed(expected)).all())


def is_unnamed_mask(value: Tensor) -> bool:
    """Return True if the values are those of an attention mask, (B, 1, T, S), under any port name."""
    if value.ndim != 4 or value.shape[1] != 1:
        return False
    if value.dtype is torch.bool:
        return True
    return (
        value.is_floating_point()
        and bool((value != 0).any())
        and bool(((value == 0) | ~allowed(value)).all())
    )


def is_any_mask(port: str, expected: Tensor) -> bool:
    """Return True for an attention mask, or a mask of padding keys, (B, S)."""
    is_of_keys = _is_named_mask(port) and expected.ndim == 2 and not expected.is_floating_point()
    return is_of_keys or is_attention_mask(port, expected)


def is_mask_of_pairs_for_padding(port: str, actual: Tensor, expected: tuple[int, ...]) -> bool:
    """Return True if a trainer passes a mask of pairs, (B, 1, T, S), instead of the padding, (B, S).

    expected: the shape in the reference.
    Such a mask is judged at attention, by the mask there or by the result.
    """
    return _is_named_mask(port) and len(expected) == 2 and actual.ndim == 4


@lru_cache(maxsize=4096)
def _is_named_mask(port: str) -> bool:
    """Return True if a port is named a mask, or is in a dict of masks by kind of attention."""
    return any(part.endswith("mask") for part in port.split(".")[-2:])


def allowed(mask: Tensor) -> Tensor:
    """Return the columns that each row of an additive or boolean mask allows."""
    if mask.dtype is torch.bool:
        return mask
    if not mask.is_floating_point():
        return mask != 0
    return mask > torch.finfo(mask.dtype).min / 2


def count_differences(
    actual: Tensor | None, expected: Tensor, rows: RowMap | None
) -> tuple[int, int]:
    """Count the compared (query, key) pairs, and those that differ; of masks of padding, the keys.

    actual: a mask, or None for an implementation's own causal mask, and for no padding.
    expected: the reference's mask, (B, 1, T, S), or (B, S) for padding.
    Rows of padding queries are ignored.
    """
    if expected.ndim == 2:
        given = torch.ones_like(expected) if actual is None else actual
        return expected.numel(), int((allowed(given) != allowed(expected)).sum())
    expected_BT1S = allowed(expected)
    batch, _, length, num_keys = expected_BT1S.shape
    if actual is None:
        causal = torch.ones(length, num_keys, dtype=torch.bool).tril(num_keys - length)
        actual_BT1S = causal.expand(batch, 1, length, num_keys)
    else:
        actual_BT1S = allowed(actual.detach().cpu())
    valid = torch.ones(batch, length, dtype=torch.bool)
    if rows is not None and (rows.num_rows, rows.length) == (batch, length):
        valid = torch.tensor(rows.positions) >= 0
    num_compared = int(valid.sum()) * num_keys
    try:
        different = actual_BT1S.broadcast_to(expected_BT1S.shape) != expected_BT1S
    except RuntimeError:  # shapes differ: no pair agrees
        return num_compared, num_compared
    return num_compared, int(different[valid[:, None, :, None].expand_as(different)].sum())


@dataclass(frozen=True, slots=True)
class AbsentMask:
    """A recorded mask where the running model has none, compared with the causal one."""

    expected: Tensor
    num_compared: int
    num_different: int

    @classmethod
    def of(cls, port: str, expected: Tensor, rows: RowMap | None) -> Self | None:
        """Compare the recorded tensor at `port`; None if it is not a mask."""
        if not is_attention_mask(port, expected):
            return None
        return cls(expected, *count_differences(None, expected, rows))


def in_form_of(actual: Tensor, expected: Tensor) -> Tensor:
    """Convert `expected` to the kind and dtype of the mask `actual`."""
    if not actual.is_floating_point():
        return allowed(expected).to(actual.dtype)
    lowest = torch.finfo(actual.dtype).min
    return torch.zeros_like(expected, dtype=actual.dtype).masked_fill(~allowed(expected), lowest)


def mask_for(module: nn.Module, expected: Tensor) -> Tensor:
    """Convert `expected` to the dtype and device of `module`."""
    parameters = list(module.parameters())
    device = next((p.device for p in parameters), expected.device)
    dtype = next((p.dtype for p in parameters if p.is_floating_point()), torch.float32)
    return in_form_of(torch.zeros(0, dtype=dtype), expected).to(device)
