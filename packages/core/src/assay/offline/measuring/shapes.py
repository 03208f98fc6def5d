"""Conversion of the two tensors of a pair to one shape and comparable dtypes.

Shape legend: R tokens, C channels.
"""

import torch
from torch import Tensor

from assay.offline.tokens.passes import PassPair, take_rows
from assay.sites import RowMap


def describe_shapes(value: Tensor, reference: Tensor) -> str:
    """Describe both shapes, as the reason why a pair is not compared."""
    return f"its shape is {list(value.shape)}, expected {list(reference.shape)}"


def take_both(
    pair: PassPair, value: Tensor, reference: Tensor
) -> tuple[Tensor, Tensor, RowMap | None] | None:
    """Return the rows of the paired tokens in both tensors, (R, 1, C), and their addresses."""
    expected = take_rows(reference, pair.expected, pair.expected_rows)
    actual = take_rows(value, pair.actual, pair.actual_rows)
    if expected is None or actual is None or not bool((expected[1] & actual[1]).any()):
        return None
    kept = expected[1] & actual[1]
    rows = pair.rows
    if rows is not None:
        numbers = kept.nonzero()[:, 0].tolist()
        rows = RowMap(
            tuple(rows.prompts[number] for number in numbers),
            tuple(rows.positions[number] for number in numbers),
        )
    return actual[0][kept], expected[0][kept], rows


def give_comparable(
    pair: PassPair | None, value: Tensor, reference: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Return the shared tokens of both tensors in one shape; None if the shapes are incompatible.

    pair: None for parameters, which must have the same shape.
    """
    if pair is None:
        return (value, reference) if value.shape == reference.shape else None
    if pair.expected_rows is None:
        if value.shape == reference.shape:
            return value, reference
        if (
            value.numel() == reference.numel()
            and (shaped := give_same_shape(value, reference)) is not None
        ):
            return shaped
    taken = take_both(pair.by_row(), value, reference)
    return taken[:2] if taken is not None and taken[0].shape == taken[1].shape else None


def expects_nothing(pair: PassPair, reference: Tensor) -> bool:
    """Return True if the expected tensor holds none of the paired tokens, as logits of the last token."""
    taken = take_rows(reference, pair.expected, pair.expected_rows)
    return taken is not None and not bool(taken[1].any())


def count_each(value: Tensor, reference: Tensor, rows: RowMap | None) -> tuple[Tensor, Tensor]:
    """Return integers with a last dim of 1, so that each value counts, and other tensors unchanged."""
    is_of_tokens = rows is not None and value.shape == (rows.num_rows, rows.length)
    if reference.is_floating_point() or is_of_tokens:
        return value, reference
    return value[..., None], reference[..., None]


def give_same_shape(value: Tensor, reference: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return both in one shape if only their leading dims differ; else None."""
    if value.numel() == reference.numel() and value.shape[-1:] == reference.shape[-1:]:
        return value.reshape(reference.shape), reference
    if 1 in (*value.shape[:1], *reference.shape[:1]):
        try:
            value, reference = torch.broadcast_tensors(value, reference)
        except RuntimeError:
            return None
        return value, reference
    return None


def coarsest_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Return the narrowest dtype; of float16 and bfloat16, bfloat16."""
    return min(dtypes, key=lambda one: (one.itemsize, str(one)))


def give_comparable_dtype(value: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Return actual unchanged and expected in the wider dtype."""
    if reference.is_floating_point() != value.is_floating_point():
        return value.double(), reference.double()
    if reference.is_floating_point():
        return value, reference.to(torch.promote_types(value.dtype, reference.dtype))
    return value, reference
