"""Finds wrong factors of gradients: clipped too early, still scaled, missing or weighted parts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from assay.comparing.levels import DiagnosedFault
from assay.errors import name_alike
from assay.locating.gradients import ScaledStep, was_read_scaled
from assay.sites import Phase
from assay.training.judging.evidence import TrainEvidence
from assay.training.judging.groups import JudgedGroup
from assay.training.judging.places import describe_steps, location_of_parameter
from assay.training.processes.trainer_report import TrainerReport
from assay.training.protocol import TrainingPlan
from assay.training.replay.observing.findings import GradientShare
from assay.verdicts import Location

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


# "clip-norm" and "loss-scale" both show as a norm that is off by one factor in all steps.
_SAME_FACTOR = 0.02


def is_scale_removed(evidence: TrainEvidence, groups: Mapping[str, JudgedGroup]) -> bool:
    """Return True if some phase removes the loss scale, correctly or not.

    A scale that nothing removes is an error of the loss, and is judged without dividing it out.
    Clipping alone hides such a scale: it gives gradients of any length the same norm.

    Both arguments belong to the replay with the scale divided out.
    """
    steps = evidence.report.loss.scaled_steps
    late = bool(groups["stage-optimizer"].failed) or any(
        item.port.port != "norm" for item in groups["stage-clip"].failed
    )
    if any(map(was_read_scaled, steps)):
        return late
    if any(step.taken_off is None and step.factor != 1 for step in steps):
        is_visible = "clip" not in evidence.report.traits.invisible_phases
        known = [step.norm is not None and step.norm == step.norm for step in steps]
        return (is_visible or all(known)) and not late
    return True


def is_divided_by_another_factor(evidence: TrainEvidence) -> bool:
    """Return True if, in some step, most gradients are the reference's times one wrong factor."""
    lengths = [s.left for s in evidence.report.loss.scaled_steps if s.left is not None]
    return any(abs(length - 1) > _SAME_FACTOR for length in lengths)


def is_norm_off_by_one_factor(evidence: TrainEvidence) -> bool:
    """Return True if all norms before clipping are the reference's times one wrong factor.

    The factor is not the loss scale itself.
    """
    steps = [step for step in evidence.report.loss.scaled_steps if step.factor != 1]
    norms = [step.norm for step in steps if step.norm is not None]
    if not norms or len(norms) < len(steps) or any(map(was_read_scaled, steps)):
        return False
    return (
        min(norms) > 0
        and max(norms) - min(norms) <= _SAME_FACTOR * min(norms)
        and abs(norms[0] - 1) > _SAME_FACTOR
    )


def notes_on_scale(steps: Sequence[ScaledStep]) -> list[str]:
    """Note the loss scale, and the phase that removes it."""
    notes = []
    for step in steps:
        if step.factor != 1:
            where = f"in {step.taken_off}" if step.taken_off else "in the optimizer's phase"
            mean = f"; the number of ranks in it in {step.averaged}" if step.averaged else ""
            notes.append(f"the loss is scaled by {step.factor:g}, taken off {where}{mean}")
        elif step.of_loss != 1:
            notes.append(
                f"compute_loss returns {step.of_loss:g} times the loss: backward takes it off"
            )
    return list(dict.fromkeys(notes))


# Far above the rounding of any dtype, and below the effect of one missing part of many.
_LEAST_SHARE = 0.05


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


def describe_factor(factor: float) -> str:
    """Put a factor before the value that it multiplies: "1/4 of" or "0.3 times"."""
    parts = round(1 / factor) if factor > 0 else 0
    is_share = parts > 1 and abs(factor * parts - 1) <= _SAME_FACTOR
    return f"1/{parts} of" if is_share else f"{factor:.3g} times"


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
    return abs(one.share) <= _LEAST_SHARE


def _is_wrong(one: GradientShare) -> bool:
    return abs(one.share - 1) > _LEAST_SHARE
