"""Labels, micro-batches and parameters that are wrong are named, in whole messages."""

from typing import Any

import pytest

from assay.comparing.wording.deciding_rows import find_deciding_rows
from assay.comparing.wording.explain import explain_verdict
from assay.locating.label_gradients import LabelDifference
from assay.locating.loss_scale import ScaledStep
from assay.training.judging.verdict import judge_training
from assay.training.replay.observing.gradient_sums import GradientShare
from assay.verdicts import Outcome
from packages.core.tests.unit.training.judging.evidence_by_hand import (
    KINDS,
    LOSS_GRADIENT,
    STEPS,
    WRONG,
    evidence,
    gradient,
    report,
    step_results,
    times,
)


def message(changed: dict[Any, Any], **facts: Any) -> list[str]:
    made = evidence(step_results(changed), reports=report(**facts))
    verdict, rows = judge_training(made)
    assert verdict.verdict is Outcome.FAIL
    assert verdict.location is not None
    assert [one.location for one in verdict.suspects].count(verdict.location) == 1
    return explain_verdict(verdict, find_deciding_rows(verdict, rows)).message.splitlines()


def shares(*of_step: float, steps: int = STEPS) -> list[GradientShare]:
    return [
        GradientShare(step=step, source=number, share=share)
        for step in range(steps)
        for number, share in enumerate(of_step)
    ]


def test_prompts_that_are_trained_on_are_named_by_their_rows() -> None:
    labels = [
        LabelDifference(step=step, micro_batch=number, row=row, fault="prompt", count=5)
        for step, number, row in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (2, 0, 0))
    ]

    lines = message({LOSS_GRADIENT: WRONG}, labels=labels)

    assert [*lines[:3], lines[-1]] == [
        "The inputs of the model (inputs, step 0) differ from the reference.",
        (
            "  labels: prompts are trained on: 20 of their tokens are labels, which the reference"
            " masks (micro-batch 0 rows 0 and 1, micro-batch 1 row 0 of step 0, and 1 later)"
        ),
        "  diagnosis inputs-differ: inputs or labels are not those of the reference",
        "Next: assay explain inputs-differ",
    ]


@pytest.mark.parametrize(
    ("of_step", "diagnosis", "words"),
    [
        ((1.0, 0.0), "missing-reduction", "lack the share of micro-batch 1"),
        ((0.0, 1.0), "missing-reduction", "lack the share of micro-batch 0"),
        (
            (1.0, 0.01, 1.0, 0.0),
            "missing-reduction",
            "lack the share of micro-batch 1, lack the share of micro-batch 3",
        ),
        ((1.0, 2.0, 1.0), "loss-scale", "have 2 times the share of micro-batch 1"),
        ((0.5, 1.0), "loss-scale", "have 0.5 times the share of micro-batch 0"),
    ],
)
def test_micro_batch_whose_share_is_wrong_is_named(
    of_step: tuple[float, ...], diagnosis: str, words: str
) -> None:
    wrong = {gradient(module): times(0.7) for module in KINDS}

    lines = message(wrong, shares=shares(*of_step))

    assert lines[:2] == [
        "The gradients of all parameters (backward, step 0) differ from the reference.",
        f"  the gradients {words} (step 0, and 2 later)",
    ]
    assert lines[-1] == f"Next: assay explain {diagnosis}"


@pytest.mark.parametrize("of_step", [(1.0, 1.0), (2.0, 2.0), (1.02, 0.99)])
def test_shares_that_are_alike_name_no_micro_batch(of_step: tuple[float, ...]) -> None:
    lines = message({gradient("a"): WRONG}, shares=shares(*of_step))

    assert lines[0].startswith("a, parameter weight (backward, step 0)")


def test_scale_of_the_loss_is_not_a_wrong_share() -> None:
    scaled = [ScaledStep(step=step, factor=1024.0, of_loss=1.0) for step in range(STEPS)]

    lines = message({gradient("a"): WRONG}, shares=shares(1024.0, 0.0), scaled_steps=scaled)

    assert lines[1] == "  the gradients lack the share of micro-batch 1 (step 0, and 2 later)"


def test_rank_whose_share_is_not_reduced_is_named() -> None:
    wrong = {gradient(module, "reduce"): WRONG for module in KINDS}

    lines = message(wrong, rank_shares=shares(1.0, 0.0))

    assert lines[:2] == [
        "The reduction of gradients (reduce, step 0) differs from the reference.",
        "  the gradients lack the share of rank 1 (step 0, and 2 later)",
    ]


def test_parameters_that_the_optimizer_does_not_hold_are_counted_and_named() -> None:
    names = [f"h.{layer}.norm.weight" for layer in range(17)]

    lines = message({}, not_in_optimizer=[*names, "head.bias"])

    assert lines[:3] == [
        "The optimizer step (optimizer, step 0) differs from the reference.",
        "  18 of 3 trained parameters are not in the optimizer: h.*.norm.weight (17), head.bias",
        "  its gradients are the reference's own: the error is made here",
    ]
