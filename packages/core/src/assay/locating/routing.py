"""Choices between nearly equal scores: an expert router's ties are not errors."""

from torch import Tensor

# A choice can flip where the margin is within this many times the rms error of the scores in a
# healthy run: scores may have 3.2 times that error before they fail themselves (the limit of
# replay-tensor), and eight standard deviations of it are over five of a difference of two.
TIE_MARGIN = 8.0 * 3.2

# Indices are a choice by these scores if they are their largest in most rows.
_MOSTLY = 0.5


def near_tie_rows(actual: Tensor, expected: Tensor, scores: Tensor, error: float) -> Tensor:
    """Rows whose choice differs only because the scores are nearly equal, (R,) bool.

    error: root mean square error of the scores in a healthy run of the same dtype.
    Shapes: actual and expected (R, k) indices, best first; scores (R, E).
    A row counts only if `expected` are in fact the k largest of `scores`, and if at every rank the
    score of what was chosen is within the margin of the score of what should have been.
    """
    scores = scores.double()
    top = scores.topk(expected.shape[-1], dim=-1).indices.sort(-1).values
    is_choice = (top == expected.sort(-1).values).all(-1)
    gap = (scores.gather(-1, expected) - scores.gather(-1, actual)).abs().amax(-1)
    differs = (actual != expected).any(-1)
    return differs & is_choice & (gap <= TIE_MARGIN * error)


def find_scores(indices: Tensor, siblings: dict[str, Tensor]) -> str | None:
    """The name of the sibling output of which `indices` are the largest entries, if one is."""
    for name, scores in siblings.items():
        if scores.is_floating_point() and scores.ndim == 2 and indices.ndim == 2:
            num_rows, k = indices.shape
            if scores.shape[0] == num_rows and scores.shape[1] > k:
                top = scores.double().topk(k, dim=-1).indices.sort(-1).values
                if bool((top == indices.sort(-1).values).all(-1).float().mean() > _MOSTLY):
                    return name
    return None
