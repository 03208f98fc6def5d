"""Find micro-batches, ranks and earlier steps whose part in a step's gradients is missing or has a wrong weight."""

from collections.abc import Sequence
from dataclasses import replace

from assay.errors import name_alike
from assay.judge.levels import DiagnosedFault
from assay.sites import Phase
from assay.training.judging.evidence import TrainEvidence, describe_steps, location_of_parameter
from assay.training.reports import GradientShare
from assay.verdicts import Location

# Far above the rounding of any dtype, and below the effect of one missing part of many.
_LEAST_SHARE = 0.05


def find_wrong_shares(evidence: TrainEvidence) -> DiagnosedFault | None:
    """Name micro-batches whose part of the gradients is missing or has a wrong weight.

    A factor common to all of them is ignored: it belongs to the loss.
    """
    factors = {one.step: one.factor for one in evidence.report.replay.scaled_steps}
    ranks: dict[tuple[int, int], int] = {}
    shares: dict[tuple[int, int], GradientShare] = {}
    for rank, report in enumerate(evidence.reports):
        for one in report.gradients.shares:
            own = replace(one, share=one.share / factors.get(one.step, 1.0))
            if shares.setdefault((one.step, one.source), own) is own:
                ranks[one.step, one.source] = rank
    finding = _find_unlike(list(shares.values()), "micro-batch", "backward")
    if finding is None or not evidence.on_ranks:
        return finding
    first = min(key for key, one in shares.items() if _is_wrong(one))
    location = finding.location.model_copy(update={"rank": ranks[first]})
    return DiagnosedFault(finding.diagnosis, location, finding.reason)


def find_kept_gradients(evidence: TrainEvidence, location: Location) -> DiagnosedFault | None:
    """Find gradients of the step before that a step does not clear; `location` is where they show."""
    kept = [one for one in evidence.report.gradients.kept if abs(one.share) > _LEAST_SHARE]
    if not kept:
        return None
    first = min(kept, key=lambda one: one.step)
    in_all = len(first.parameters) >= evidence.reference.num_trainable
    name = location.parameter if location.parameter in first.parameters else first.parameters[0]
    place = location_of_parameter("backward", None if in_all else name, first.step)
    times = "" if abs(first.share - 1) < _LEAST_SHARE else f", {first.share:.2g} times"
    reason = (
        f"the gradients of step {first.step} also hold those of step {first.step - 1}"
        f"{times}: nothing clears `.grad` of"
        f" {'all parameters' if in_all else name_alike(first.parameters)}"
        f" ({describe_steps(one.step for one in kept)})"
    )
    return DiagnosedFault("missing-reduction", place, reason)


def find_wrong_rank_shares(evidence: TrainEvidence) -> DiagnosedFault | None:
    """Name ranks whose part of the reduced gradients is missing or has a wrong weight."""
    return _find_unlike(evidence.reports[0].gradients.rank_shares, "rank", "reduce")


def _find_unlike(
    shares: Sequence[GradientShare], source: str, phase: Phase
) -> DiagnosedFault | None:
    unlike: list[GradientShare] = []
    for step in {one.step for one in shares}:
        of_step = [one for one in shares if one.step == step]
        sizes = [one.share for one in of_step]
        if max(sizes) - min(sizes) > _LEAST_SHARE * max(1.0, *sizes):
            unlike += filter(_is_wrong, of_step)
    if not unlike:
        return None
    first = min(one.step for one in unlike)
    facts: dict[str, list[str]] = {}
    for one in unlike:
        if one.step == first:
            verb, times = ("lack", "") if _is_missing(one) else ("hold", f"{one.share:.2g} times ")
            share = "that" if verb in facts else "the share"
            facts.setdefault(verb, []).append(f"{times}{share} of {source} {one.source}")
    words = " and ".join(f"{verb} {' and '.join(shares)}" for verb, shares in facts.items())
    reason = f"the gradients {words} ({describe_steps(one.step for one in unlike)})"
    location = Location(phase=phase, step=first)
    is_missing = all(map(_is_missing, unlike))
    return DiagnosedFault("missing-reduction" if is_missing else "loss-scale", location, reason)


def _is_missing(one: GradientShare) -> bool:
    return abs(one.share) <= _LEAST_SHARE


def _is_wrong(one: GradientShare) -> bool:
    return abs(one.share - 1) > _LEAST_SHARE
