"""Near ties of expert routers: choices between nearly equal scores, which are not errors."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# A choice can flip if the margin is within this many times the rms error of the scores in a healthy
# run: scores may have 3.2 times that error before they fail (the limit of replay-tensor), and eight of
# its standard deviations are over five of a difference of two scores.
TIE_MARGIN = 8.0 * 3.2

# Indices are a choice by these scores if they are their largest in most rows.
_MOSTLY = 0.5


def near_tie_rows(actual: Tensor, expected: Tensor, scores: Tensor, error: float) -> Tensor:
    """Return the rows whose choice differs only because scores are nearly equal, (R,) bool.

    error: root mean square error of the scores in a healthy run of the same dtype.
    Shapes: actual and expected (R, k) indices, best first; scores (R, E).
    In such a row, `expected` are the k largest of `scores`, and the score of each choice is within the
    margin of the score of the expected choice in its column.
    """
    scores = scores.double()
    top = scores.topk(expected.shape[-1], dim=-1).indices.sort(-1).values
    is_choice = (top == expected.sort(-1).values).all(-1)
    gap = (scores.gather(-1, expected) - scores.gather(-1, actual)).abs().amax(-1)
    differs = (actual != expected).any(-1)
    return differs & is_choice & (gap <= TIE_MARGIN * error)


@dataclass(frozen=True, slots=True)
class Choice:
    """The ports of a router's results: the chosen indices, and the scores that decide."""

    indices: str
    scores: str


def may_be_routing(outputs: Mapping[str, Tensor]) -> bool:
    """Return True if there are both indices and scores among these results."""
    return len({tensor.is_floating_point() for tensor in outputs.values()}) > 1


def find_choice(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Choice | None:
    """Find the first indices that other results of the same call decide, by port.

    Shapes: of both sides the results of two dims.
    """
    for port, indices in actual.items():
        if not indices.is_floating_point() and indices.shape == expected[port].shape:
            siblings = {other: expected[other] for other in actual if other != port}
            scores = find_scores(expected[port], siblings)
            if scores is not None:
                return Choice(port, scores)
    return None


def columns_in_order(actual: Tensor, expected: Tensor) -> Tensor | None:
    """Return the columns of `actual` in the order of `expected`; None if they are in that order.

    An unsorted top-k returns experts in any order. Experts that only `actual` has take the places of
    those that only `expected` has.
    Shapes: all (R, k); a row with an expert twice keeps its order.
    """
    alike_Rke = expected[:, :, None] == actual[:, None, :]
    is_shared, column = alike_Rke.any(2), alike_Rke.int().argmax(2)
    of_others = torch.zeros_like(column)
    lacking = is_shared.int().argsort(stable=True, dim=1)
    others = alike_Rke.any(1).int().argsort(stable=True, dim=1)
    of_others.scatter_(1, lacking, others)
    columns = torch.where(is_shared, column, of_others)
    own = torch.arange(actual.shape[1]).expand_as(columns)
    is_order = (columns.sort(1).values == own).all(1, keepdim=True)
    columns = torch.where(is_order, columns, own)
    return None if torch.equal(columns, own) else columns


def find_order(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Tensor | None:
    """Return `columns_in_order` of the first indices for which one result has the same shape.

    Shapes: of both sides the results of two dims.
    """
    shapes = [tensor.shape for tensor in actual.values() if tensor.is_floating_point()]
    for port, indices in actual.items():
        is_choice = not indices.is_floating_point() and shapes.count(indices.shape) == 1
        if is_choice and indices.shape == expected[port].shape:
            return columns_in_order(indices, expected[port])
    return None


def root_mean_square(actual: Tensor, expected: Tensor) -> float:
    """Return the root mean square of the error of `actual`."""
    return float((actual.double() - expected.double()).pow(2).mean().sqrt())


def find_scores(indices: Tensor, siblings: dict[str, Tensor]) -> str | None:
    """Return the name of the sibling output whose largest entries `indices` are."""
    for name, scores in siblings.items():
        if scores.is_floating_point() and scores.ndim == 2 and indices.ndim == 2:
            num_rows, k = indices.shape
            if scores.shape[0] == num_rows and scores.shape[1] > k:
                top = scores.double().topk(k, dim=-1).indices.sort(-1).values
                if bool((top == indices.sort(-1).values).all(-1).float().mean() > _MOSTLY):
                    return name
    return None
