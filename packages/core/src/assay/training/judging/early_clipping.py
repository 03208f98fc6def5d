"""Gradients that were clipped before they were added up, by what norms that leaves."""

from collections.abc import Sequence

from assay.training.processes.requests import CandidateReport
from assay.training.protocol import TrainingPlan

# Norms of clipped gradients are the limit but for rounding of each element, which adds up to less
# than a unit of the coarsest dtype that is trained in, 2**-8 of bfloat16; a hundredth is beyond it.
_AT_LIMIT = 0.01

# Ranks' shares of a sum are not quite at right angles, and of not quite the same length.
_OF_SHARES = 0.1


def is_clipped_in_backward(reports: Sequence[CandidateReport]) -> bool:
    """Whether gradients have the norm to which they are clipped before they are reduced.

    After the first micro-batch of every step, or after the last one, on every rank.
    """
    norms = [norm for report in reports for norm in report.norms if norm.phase == "backward"]
    return _all_at_limit([norm.first for norm in norms]) or _all_at_limit(
        [norm.found for norm in norms]
    )


def is_clipped_in_reduce(reports: Sequence[CandidateReport]) -> bool:
    """Whether sums over ranks are too small as if each rank had clipped its share before."""
    limit = _limit()
    predicted: list[bool] = []
    for reduced in (norm for norm in reports[0].norms if norm.phase == "reduce"):
        shares = [
            share.injected
            for report in reports
            for share in report.norms
            if (share.step, share.phase) == (reduced.step, "backward")
        ]
        if not shares or min(shares) <= limit:
            return False
        expected = reduced.injected * limit * sum(1 / share for share in shares) / len(shares)
        predicted.append(abs(reduced.found - expected) <= _OF_SHARES * expected)
    return bool(predicted) and all(predicted)


def _all_at_limit(norms: Sequence[float]) -> bool:
    limit = _limit()
    return bool(norms) and all(abs(norm - limit) <= _AT_LIMIT * limit for norm in norms)


def _limit() -> float:
    """The norm to which every plan has gradients clipped."""
    return TrainingPlan("", "").max_grad_norm
