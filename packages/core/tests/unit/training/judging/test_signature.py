"""Gradients that are clipped before they are added up, and gradients that are lost."""

import math
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from assay.locating.gradients import GradientScale, ScaledStep
from assay.sites import Phase
from assay.training.judging.signature import is_clipped_in_backward, is_clipped_in_reduce
from assay.training.judging.verdict import judge_training
from assay.training.reports import GradientNorm, TrainerReport
from assay.verdicts import Outcome, Verdict
from packages.core.tests.unit.training.judging.evidence_by_hand import (
    KINDS,
    LOSS,
    LOSS_GRADIENT,
    NORM,
    STEPS,
    Place,
    diagnosed,
    evidence,
    gradient,
    report,
    step_results,
    times,
    update,
)

Changed = dict[Place, Tensor]
Norm = tuple[Phase, float, float, float]


def rank(*norms: Norm) -> TrainerReport:
    """Phase, and the norms after the first micro-batch, as found and as injected, in each step."""
    return report(
        norms=[
            GradientNorm(step=step, phase=phase, first=first, found=found, injected=injected)
            for step in range(STEPS)
            for phase, first, found, injected in norms
        ]
    )


@pytest.mark.parametrize(
    ("first", "found", "clipped"),
    [
        (1.0, 1.7, True),  # each micro-batch by itself
        (1.004, 1.003, True),  # all that was added up so far
        (math.nan, 1.0, True),
        (0.8, 1.7, False),
        (1.02, 1.7, False),
        (math.nan, math.nan, False),
    ],
)
def test_norms_at_the_limit_are_those_of_clipped_gradients(
    first: float, found: float, *, clipped: bool
) -> None:
    assert is_clipped_in_backward([rank(("backward", first, found, 3.0))]) is clipped


def test_every_rank_has_to_have_clipped_and_every_step() -> None:
    clipped: Norm = ("backward", 1.0, 1.0, 3.0)
    other: Norm = ("backward", 2.0, 2.0, 3.0)

    assert is_clipped_in_backward([rank(clipped), rank(clipped)])
    assert not is_clipped_in_backward([rank(clipped), rank(other)])
    assert not is_clipped_in_backward([report()])


def ranks_after(found: float, share: float = 2.0) -> list[TrainerReport]:
    """Two ranks, each with a share of a gradient of norm 3."""
    shares: Norm = ("backward", math.nan, 2.5, share)
    return [rank(shares, ("reduce", math.nan, found, 3.0)) for _ in range(2)]


@pytest.mark.parametrize(
    ("found", "share", "clipped"),
    [(1.5, 2.0, True), (1.6, 2.0, True), (1.7, 2.0, False), (3.0, 2.0, False), (1.5, 0.9, False)],
)
def test_sum_of_clipped_shares_is_as_much_too_small_as_each_of_them(
    found: float, share: float, *, clipped: bool
) -> None:
    assert is_clipped_in_reduce(ranks_after(found, share)) is clipped


def wrong_in(phase: Phase, *factors: float) -> Changed:
    return {
        gradient(module, phase): times(factor)
        for module, factor in zip(KINDS, factors, strict=True)
    }


def test_each_micro_batch_clipped_is_a_wrong_norm_and_no_missing_part() -> None:
    changed = wrong_in("backward", 0.5, 0.3, 0.7)
    clipped = rank(("backward", 1.0, 1.7, 3.0))

    finding = diagnosed(evidence(step_results(changed), reports=clipped))
    assert (finding.diagnosis, finding.location.module) == ("clip-norm", None)

    lost = report(errors_of_sums={f"{module}.weight": 0.5 for module in KINDS})
    other = diagnosed(evidence(step_results(changed), reports=lost))
    assert other.diagnosis == "missing-reduction"


def test_shares_clipped_before_they_are_added_up_are_a_wrong_norm_and_no_scale() -> None:
    results = step_results(wrong_in("reduce", 0.5, 0.5, 0.5))

    made = evidence(results, results, reports=ranks_after(1.5))
    assert diagnosed(made).diagnosis == "clip-norm"

    assert diagnosed(evidence(results, results)).diagnosis == "loss-scale"


@pytest.mark.parametrize("phase", ["backward", "reduce"])
def test_no_gradient_anywhere_is_no_scale(phase: Phase) -> None:
    finding = diagnosed(evidence(step_results(wrong_in(phase, 0.0, 0.0, 0.0))))

    assert (finding.diagnosis, finding.location.phase) == ("frozen-parameters", phase)
    assert finding.location.parameter is None

    one_left = diagnosed(evidence(step_results(wrong_in(phase, 0.0, 0.0, 0.5))))
    assert one_left.diagnosis != "frozen-parameters"


def test_loss_that_hands_back_no_gradient_is_no_scale() -> None:
    lost = [GradientScale(step=0, micro_batch=0, slope=-1.0, rest=0.0)]
    made = evidence(step_results({LOSS_GRADIENT: times(0.0)}), reports=report(logit_gradients=lost))

    assert diagnosed(made).diagnosis == "frozen-parameters"


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
