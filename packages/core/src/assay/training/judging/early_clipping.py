"""Detects gradients that were clipped too early, by the norms of what remains."""

from collections.abc import Sequence

from assay.training.processes.trainer_report import TrainerReport
from assay.training.protocol import TrainingPlan

# Clipped gradients have the limit as norm, up to the rounding of each element: in total less than one
# unit of bfloat16, 2**-8, the coarsest dtype that is trained in. A hundredth is beyond that.
_LIMIT_TOLERANCE = 0.01

# The shares of ranks are not quite orthogonal, and not quite of equal length.
_SHARE_TOLERANCE = 0.1

# Every plan clips to this norm.
_LIMIT = TrainingPlan("", "").max_grad_norm


def is_clipped_in_backward(reports: Sequence[TrainerReport]) -> bool:
    """Return True if gradients have the clipping norm before they are reduced.

    On every rank, after the first micro-batch of every step or after the last one.
    """
    norms = [one for report in reports for one in report.gradients.norms if one.phase == "backward"]
    return _all_at_limit([norm.first for norm in norms]) or _all_at_limit(
        [norm.found for norm in norms]
    )


def is_clipped_in_reduce(reports: Sequence[TrainerReport]) -> bool:
    """Return True if sums over ranks are as small as if each rank had clipped its share."""
    predicted: list[bool] = []
    for reduced in (norm for norm in reports[0].gradients.norms if norm.phase == "reduce"):
        shares = [
            share.injected
            for report in reports
            for share in report.gradients.norms
            if (share.step, share.phase) == (reduced.step, "backward")
        ]
        if not shares or min(shares) <= _LIMIT:
            return False
        expected = reduced.injected * _LIMIT * sum(1 / share for share in shares) / len(shares)
        predicted.append(abs(reduced.found - expected) <= _SHARE_TOLERANCE * expected)
    return bool(predicted) and all(predicted)


def _all_at_limit(norms: Sequence[float]) -> bool:
    return bool(norms) and all(abs(norm - _LIMIT) <= _LIMIT_TOLERANCE * _LIMIT for norm in norms)
