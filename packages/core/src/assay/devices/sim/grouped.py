"""Grouped matrix products, as mixture-of-experts models use them: each group has its own matrix.

Shapes: T rows over all groups, G groups, K terms of a sum, M and N rows and columns.
offsets_G holds the end of each group. The first group starts at 0.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from assay.devices.sim.arithmetic import Arithmetic


def grouped_multiply(
    arithmetic: Arithmetic,
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute `torch.nn.functional.grouped_mm` for its four combinations of shapes.

    TK by GKN, GMK by KT, MT by TN (a sum over each group, so GMN), and GMK by GKN.
    Rows after the last group are zero.
    """
    if offs is None:
        product = arithmetic.multiply(left, right)
    elif left.ndim == right.ndim:
        product = left.new_zeros(offs.numel(), left.shape[0], right.shape[1])
        for group, rows in _groups(offs):
            product[group] = arithmetic.multiply(left[:, rows], right[rows])
    elif left.ndim < right.ndim:
        product = left.new_zeros(left.shape[0], right.shape[2])
        for group, rows in _groups(offs):
            product[rows] = arithmetic.multiply(left[rows], right[group])
    else:
        product = left.new_zeros(left.shape[1], right.shape[1])
        for group, rows in _groups(offs):
            product[:, rows] = arithmetic.multiply(left[group], right[:, rows])
    if bias is not None:
        product = product + bias
    return product if out_dtype is None else product.to(out_dtype)


def grouped_multiply_backward(
    arithmetic: Arithmetic, left_TK: Tensor, right_GKN: Tensor, offs: Tensor, gradient_TN: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of both operands of TK by GKN from the product's gradient."""
    return (
        grouped_multiply(arithmetic, gradient_TN, right_GKN.transpose(1, 2), offs),
        grouped_multiply(arithmetic, left_TK.T, gradient_TN, offs),
    )


def _groups(offsets_G: Tensor) -> Iterator[tuple[int, slice]]:
    start = 0
    for group, end in enumerate(offsets_G.tolist()):
        yield group, slice(start, end)
        start = end
