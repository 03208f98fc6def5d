"""Whether the scale of a loss is taken off before it reaches the parameters, and where."""

from collections.abc import Mapping, Sequence

from assay.locating.loss_scale import ScaledStep, was_read_scaled
from assay.training.judging.evidence import TrainEvidence
from assay.training.judging.groups import JudgedGroup
from assay.training.processes.requests import ScaledStepRecord

# What "clip-norm" and "loss-scale" have in common is a norm that is off by one number in all steps.
_SAME_NUMBER = 0.02


def is_taken_off(evidence: TrainEvidence, groups: Mapping[str, JudgedGroup]) -> bool:
    """Whether some phase takes the loss's scale off, rightly or not.

    A scale that nothing takes off is an error of the loss, and is judged with it in place. Clipping
    alone hides one: it gives gradients of all lengths the same.

    evidence, groups: of the replay with the scale divided out.
    """
    steps = evidence.report.scaled_steps
    late = bool(groups["stage-optimizer"].failed) or any(
        item.port.port != "norm" for item in groups["stage-clip"].failed
    )
    if any(was_read_scaled(_step_of(step)) for step in steps):
        return late
    if any(step.taken_off is None and step.factor != 1 for step in steps):
        seen = "clip" not in evidence.report.invisible or all(_norm_is_known(s) for s in steps)
        return seen and not late
    return True


def is_divided_by_another_factor(evidence: TrainEvidence) -> bool:
    """Whether in some step most gradients are left the reference's times one number, which is not 1."""
    lengths = [step.left for step in evidence.report.scaled_steps if step.left is not None]
    return any(abs(length - 1) > _SAME_NUMBER for length in lengths)


def is_taken_off_by_another_factor(evidence: TrainEvidence) -> bool:
    """Whether every norm that clipping finds is the reference's times one number, not the scale's."""
    steps = [step for step in evidence.report.scaled_steps if step.factor != 1]
    norms = [step.norm for step in steps if step.norm is not None]
    if not norms or len(norms) < len(steps) or any(was_read_scaled(_step_of(s)) for s in steps):
        return False
    return (
        min(norms) > 0
        and max(norms) - min(norms) <= _SAME_NUMBER * min(norms)
        and abs(norms[0] - 1) > _SAME_NUMBER
    )


def notes_on_scale(steps: Sequence[ScaledStepRecord]) -> list[str]:
    """What was recognised, and where it is taken off."""
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


def _norm_is_known(step: ScaledStepRecord) -> bool:
    return step.norm is not None and step.norm == step.norm


def _step_of(record: ScaledStepRecord) -> ScaledStep:
    return ScaledStep(**record.model_dump())
