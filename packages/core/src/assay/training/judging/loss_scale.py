"""Judges if and where the scale of a loss is removed before it reaches the parameters."""

from collections.abc import Mapping, Sequence

from assay.locating.loss_scale import ScaledStep, was_read_scaled
from assay.training.judging.evidence import TrainEvidence
from assay.training.judging.groups import JudgedGroup

# "clip-norm" and "loss-scale" both show as a norm that is off by one factor in all steps.
_SAME_NUMBER = 0.02


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
        is_visible = "clip" not in evidence.report.traits.invisible
        known = [step.norm is not None and step.norm == step.norm for step in steps]
        return (is_visible or all(known)) and not late
    return True


def is_divided_by_another_factor(evidence: TrainEvidence) -> bool:
    """Return True if, in some step, most gradients are the reference's times one wrong factor."""
    lengths = [s.left for s in evidence.report.loss.scaled_steps if s.left is not None]
    return any(abs(length - 1) > _SAME_NUMBER for length in lengths)


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
        and max(norms) - min(norms) <= _SAME_NUMBER * min(norms)
        and abs(norms[0] - 1) > _SAME_NUMBER
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
