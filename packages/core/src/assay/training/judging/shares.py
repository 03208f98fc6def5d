"""Finds micro-batches and ranks whose part of a step's gradients is missing or has a wrong weight."""

from collections.abc import Sequence
from dataclasses import replace

from assay.comparing.levels import DiagnosedFault
from assay.sites import Phase
from assay.training.judging.evidence import TrainEvidence
from assay.training.judging.places import describe_steps
from assay.training.replay.observing.gradient_sums import GradientShare
from assay.verdicts import Location

# Far above the rounding of any dtype, and below the effect of one missing part of many.
_LEAST = 0.05


def find_wrong_shares(evidence: TrainEvidence) -> DiagnosedFault | None:
    """Name micro-batches whose part of the gradients is missing or has a wrong weight.

    A factor common to all of them is ignored: it belongs to the loss.
    """
    factors = {one.step: one.factor for one in evidence.report.loss.scaled_steps}
    ranks: dict[tuple[int, int], int] = {}
    shares: dict[tuple[int, int], GradientShare] = {}
    for rank, report in enumerate(evidence.reports):
        for one in report.gradients.shares:
            own = replace(one, share=one.share / factors.get(one.step, 1.0))
            if shares.setdefault((one.step, one.source), own) is own:
                ranks[one.step, one.source] = rank
    finding = _find(list(shares.values()), "micro-batch", "backward")
    if finding is None or not evidence.on_ranks:
        return finding
    first = min(key for key, one in shares.items() if _is_wrong(one))
    location = finding.location.model_copy(update={"rank": ranks[first]})
    return DiagnosedFault(finding.diagnosis, location, finding.reason)


def find_wrong_rank_shares(evidence: TrainEvidence) -> DiagnosedFault | None:
    """Name ranks whose part of the reduced gradients is missing or has a wrong weight."""
    return _find(evidence.reports[0].gradients.rank_shares, "rank", "reduce")


def _find(shares: Sequence[GradientShare], source: str, phase: Phase) -> DiagnosedFault | None:
    unlike: list[GradientShare] = []
    for step in {one.step for one in shares}:
        of_step = [one for one in shares if one.step == step]
        sizes = [one.share for one in of_step]
        if max(sizes) - min(sizes) > _LEAST * max(1.0, *sizes):
            unlike += filter(_is_wrong, of_step)
    if not unlike:
        return None
    first = min(one.step for one in unlike)
    facts = [
        f"{'lack' if _is_missing(one) else f'have {one.share:.2g} times'} the share of {source}"
        f" {one.source}"
        for one in unlike
        if one.step == first
    ]
    reason = f"the gradients {', '.join(facts)} ({describe_steps(one.step for one in unlike)})"
    location = Location(phase=phase, step=first)
    is_missing = all(map(_is_missing, unlike))
    return DiagnosedFault("missing-reduction" if is_missing else "loss-scale", location, reason)


def _is_missing(one: GradientShare) -> bool:
    return abs(one.share) <= _LEAST


def _is_wrong(one: GradientShare) -> bool:
    return abs(one.share - 1) > _LEAST
