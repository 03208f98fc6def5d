"""Measuring one tensor against the reference's."""

import torch
from torch import Tensor

from assay.comparing.results import PortResult
from assay.hooks.row_positions import RowIndex
from assay.sites import RowMap


def measure(
    result: PortResult,
    index: RowIndex,
    rows: RowMap | None,
    excluded: Tensor | None,
    actual: Tensor,
    expected: Tensor,
) -> tuple[Tensor, Tensor]:
    """Add the error of `actual`, or for values that are not rounded the rows that differ.

    rows: of the call; index: addresses of rows for it.
    excluded: batch rows that are left out, (B,) bool; None for none.
    Shapes: actual and expected alike.
    Returns: the compared rows of both, (R, C).
    """
    actual, expected = as_real(actual), as_real(expected)
    if rows is not None and expected.shape == (rows.num_rows, rows.length):
        actual, expected = actual[..., None], expected[..., None]  # one number for each token
    (actual_RC, expected_RC), prompt, position = index.flatten(actual, expected)
    if excluded is not None and len(excluded) == expected.shape[0]:
        of_rows = excluded.reshape(-1, *[1] * (expected.ndim - 1)).expand(expected.shape)
        keep = ~index.flatten(of_rows)[0][0][:, 0]
        result.exact.num_near_ties += int((~keep).sum())
        actual_RC, expected_RC = actual_RC[keep], expected_RC[keep]
        prompt, position = prompt[keep], position[keep]
    if expected.is_floating_point():
        padding, expected_padding = index.padding(actual, expected)
        nonfinite_padding = ~padding.isfinite() & expected_padding.isfinite()
        result.num_nonfinite_padding += int(nonfinite_padding.sum())
        if actual.dtype is torch.float64:
            actual_RC = actual_RC.to(expected.dtype)  # the yardstick, as it was stored
        result.sums.add_later(actual_RC, expected_RC, prompt, position)
        return actual_RC, expected_RC
    different = (actual_RC != expected_RC).any(-1)
    result.exact.add(len(different), int(different.sum()))
    if bool(different.any()) and result.exact.first == (-1, -1):
        first = int(different.nonzero()[0])
        result.exact.first = (int(prompt[first]), int(position[first]))
    return actual_RC, expected_RC


def as_real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones along the last dim; all else as it is.

    Shapes: complex (..., C) to (..., 2 C).
    """
    if not tensor.is_complex():
        return tensor
    return torch.view_as_real(tensor.resolve_conj()).reshape(*tensor.shape[:-1], -1)


def is_broadcast_over_rows(expected: tuple[int, ...], actual: tuple[int, ...]) -> bool:
    """Whether the reference has once what this run has for each row, as positions are written."""
    return expected[:1] == (1,) and actual[:1] > (1,) and expected[1:] == actual[1:]
