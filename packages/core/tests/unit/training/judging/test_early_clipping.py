"""Gradients that are clipped before they are added up, and gradients that are lost."""

import math

import pytest
from torch import Tensor

from assay.locating.gradients import GradientScale
from assay.sites import Phase
from assay.training.judging.gradient_factors import is_clipped_in_backward, is_clipped_in_reduce
from assay.training.processes.trainer_report import TrainerReport
from assay.training.replay.observing.findings import GradientNorm
from packages.core.tests.unit.training.judging.evidence_by_hand import (
    KINDS,
    LOSS_GRADIENT,
    STEPS,
    Place,
    diagnosed,
    evidence,
    gradient,
    report,
    step_results,
    times,
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
