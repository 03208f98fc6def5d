"""A scaled loss passes where its scale is taken off, and nowhere else."""

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from assay.locating.gradients import GradientScale, ScaledStep
from assay.training.judging.verdict import judge_training
from assay.verdicts import Outcome, Verdict
from packages.core.tests.unit.training.judging.evidence_by_hand import (
    KINDS,
    LOSS,
    LOSS_GRADIENT,
    NORM,
    STEPS,
    Place,
    evidence,
    gradient,
    report,
    step_results,
    times,
    update,
)

Changed = dict[Place, Tensor]
FACTOR = 8.0

# What the first replay measures, in which a factor is an error.
IN_PLACE: Changed = {LOSS: times(FACTOR), LOSS_GRADIENT: times(FACTOR)}
CLIPPED: Changed = {gradient(module, "clip"): times(1 / FACTOR) for module in KINDS}
UPDATED: Changed = {update(module): times(1 / FACTOR) for module in KINDS}


def judged(
    divided_out: Changed,
    norm: float | None = None,
    invisible: dict[str, str] | None = None,
    **step: Any,
) -> Verdict:
    """The verdict over a loss that is scaled; `divided_out`: what the second replay measures."""
    steps = [
        ScaledStep(**{"step": n, "factor": FACTOR, "of_loss": 1.0, "norm": norm} | step)
        for n in range(STEPS)
    ]
    scales = [GradientScale(step=n, micro_batch=0, slope=FACTOR - 1, rest=0) for n in range(3)]
    made = evidence(
        step_results(IN_PLACE),
        reports=report(
            scaled_steps=steps, logit_gradients=scales, invisible_phases=invisible or {}
        ),
    )
    second = evidence(step_results(divided_out))
    return judge_training(replace(made, scaled=second.candidates))[0]


def told(verdict: Verdict) -> tuple[str | None, str | None]:
    return verdict.diagnosis, verdict.location.phase if verdict.location else None


@pytest.mark.parametrize(
    ("step", "note"),
    [
        ({"taken_off": "reduce"}, "the loss is scaled by 8, taken off in reduce"),
        ({"taken_off": "clip", "norm": 1.0}, "the loss is scaled by 8, taken off in clip"),
        ({"taken_off": None}, "the loss is scaled by 8, taken off in the optimizer's phase"),
        (
            {"factor": 1.0, "of_loss": 2.0},
            "compute_loss returns 2 times the loss: backward takes it off",
        ),
    ],
)
def test_scale_that_is_taken_off_is_a_note(step: dict[str, Any], note: str) -> None:
    verdict = judged({}, **step)

    assert verdict.verdict is Outcome.PASS
    assert note in verdict.notes


def test_scale_that_nothing_takes_off_is_an_error_of_the_loss() -> None:
    moments_too_large: Changed = {update(module): times(FACTOR) for module in KINDS}

    # Clipping gives gradients of all lengths the same: only the norm shows the factor.
    for verdict in (
        judged({NORM: times(FACTOR)}, norm=FACTOR, taken_off="clip"),
        judged(moments_too_large),
    ):
        assert verdict.verdict is Outcome.FAIL
        assert told(verdict) == ("loss-scale", "backward")


@pytest.mark.parametrize("later", [CLIPPED, UPDATED], ids=["in clip", "in the optimizer's phase"])
def test_scale_that_is_taken_off_after_clipping_is_a_wrong_norm(later: Changed) -> None:
    verdict = judged({NORM: times(FACTOR), **later}, norm=FACTOR, taken_off="clip")

    assert verdict.verdict is Outcome.FAIL
    assert told(verdict) == ("clip-norm", "clip")


@pytest.mark.parametrize(
    ("left", "diagnosis"),
    [(0.5, "loss-scale"), (1.0, "missing-reduction"), (None, "missing-reduction")],
)
def test_one_step_whose_gradients_are_divided_by_another_factor(
    left: float | None, diagnosis: str
) -> None:
    modules = sorted(KINDS)
    # Over all steps no two parameters are off by one factor.
    reduced: Changed = {
        gradient(module, "reduce"): times(0.5 + 0.4 * number / len(modules))
        for number, module in enumerate(modules)
    }
    assert told(judged(reduced, taken_off="reduce", left=left)) == (diagnosis, "reduce")


@pytest.mark.parametrize("factor", [FACTOR, 10.0])  # only the power of two rounds nothing
def test_scale_that_is_taken_off_by_another_factor_is_one(factor: float) -> None:
    halved = times(0.5)
    reduced: Changed = {gradient(module, "reduce"): halved for module in KINDS}

    assert told(judged(reduced, taken_off="reduce", factor=factor)) == ("loss-scale", "reduce")
    assert told(judged({NORM: halved}, norm=0.5, taken_off="clip")) == ("loss-scale", "clip")


def test_norm_that_is_wrong_beside_a_right_scale_is_a_wrong_norm() -> None:
    verdict = judged({NORM: times(0.5)}, norm=None, taken_off="reduce")

    assert told(verdict) == ("clip-norm", "clip")


@pytest.mark.parametrize(
    ("norm", "outcome"), [(1.0, Outcome.PASS), (FACTOR, Outcome.FAIL), (None, Outcome.FAIL)]
)
def test_clipping_that_nobody_sees_needs_a_norm_to_show_that_the_scale_was_off(
    norm: float | None, outcome: Outcome
) -> None:
    assert judged({}, norm=norm, invisible={"clip": "the optimizer clips"}).verdict is outcome


def test_error_beside_a_scale_is_found_at_its_place() -> None:
    verdict = judged({gradient("b"): times(1.5)}, taken_off="reduce")

    assert verdict.verdict is Outcome.FAIL
    assert verdict.location is not None
    assert (verdict.diagnosis, verdict.location.module) == ("module-error", "b")
