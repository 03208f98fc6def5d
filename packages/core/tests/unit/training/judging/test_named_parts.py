"""Labels, micro-batches and parameters that are wrong are named, in whole messages."""

from typing import Any

import pytest
import torch

from assay.judge.explain import explain_verdict, find_deciding_rows
from assay.replay.gradients import LabelDifference, ScaledStep
from assay.training.judging.verdict import judge_training
from assay.training.reports import GradientShare, KeptGradients
from assay.verdicts import Outcome
from packages.core.tests.unit.training.judging.evidence_by_hand import (
    KINDS,
    LOSS_GRADIENT,
    NORM,
    STEPS,
    WRONG,
    evidence,
    from_step,
    gradient,
    report,
    rounding,
    step_results,
    times,
    update,
)


def message(changed: dict[Any, Any], /, **facts: Any) -> list[str]:
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
            "lack the share of micro-batch 1 and that of micro-batch 3",
        ),
        ((1.0, 2.0, 1.0), "loss-scale", "hold 2 times the share of micro-batch 1"),
        (
            (1.2, 7.2),
            "loss-scale",
            "hold 1.2 times the share of micro-batch 0 and 7.2 times that of micro-batch 1",
        ),
        (
            (0.5, 0.0, 1.0),
            "loss-scale",
            "hold 0.5 times the share of micro-batch 0 and lack the share of micro-batch 1",
        ),
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
        "  diagnosis frozen-parameters: parameters that should move do not",
    ]


@pytest.mark.parametrize(
    ("phase", "names", "head", "cleared"),
    [
        ("backward", [], "The gradients of all parameters", "all parameters"),
        ("clip", [], "The gradients of all parameters", "all parameters"),
        ("backward", ["norm.weight"], "norm, parameter weight", "norm.weight"),
    ],
)
def test_gradients_of_the_step_before_are_told_with_their_share(
    phase: Any, names: list[str], head: str, cleared: str
) -> None:
    modules = [name.removesuffix(".weight") for name in names] or list(KINDS)
    wrong = {gradient(module, phase): from_step(1, WRONG) for module in modules}
    kept = [
        KeptGradients(step, 1.0, names or [f"{module}.weight" for module in KINDS])
        for step in (1, 2)
    ]

    lines = message(wrong, kept=kept, invisible_phases={} if phase == "backward" else HIDDEN)

    assert lines[:2] == [
        f"{head} (backward, step 1) {'differ' if not names else 'differs'} from the reference.",
        (
            "  the gradients of step 1 also hold those of step 0: nothing clears `.grad` of"
            f" {cleared} (step 1, and 1 later)"
        ),
    ]
    assert (
        "  diagnosis missing-reduction: gradients are not the sum of what the ranks and micro-batches"
        " of the step contribute"
    ) in lines


HIDDEN = {"backward": "no method shows its end"}


def test_part_of_the_step_before_is_told_as_its_share() -> None:
    kept = [KeptGradients(1, 0.5, ["a.weight"])]

    line = message({gradient("a"): from_step(1, WRONG)}, kept=kept)[1]

    assert "also hold those of step 0, 0.5 times: nothing clears" in line


def test_share_of_zero_of_the_step_before_is_no_fault() -> None:
    kept = [KeptGradients(1, 0.01, ["a.weight"])]

    assert "hold" not in message({gradient("a"): WRONG}, kept=kept)[1]


def test_parameter_without_requires_grad_is_named_with_the_reason() -> None:
    wrong = {gradient("a"): times(0.0), update("a"): times(0.0)}

    lines = message(wrong, frozen=["a.weight"])

    assert lines[:2] == [
        "a, parameter weight (optimizer, step 0) differs from the reference.",
        "  1 of 3 trained parameters have requires_grad=False and get no gradient: a.weight",
    ]
    assert not any("made here" in line for line in lines)


@pytest.mark.parametrize(("phase", "invisible"), [("backward", {}), ("clip", HIDDEN)])
def test_parameter_that_gets_no_gradient_is_named(phase: Any, invisible: dict[str, str]) -> None:
    lines = message({gradient("a", phase): times(0.0)}, invisible_phases=invisible)

    assert lines[:2] == [
        "a, parameter weight (backward, step 0) differs from the reference.",
        "  1 of 3 trained parameters get no gradient: a.weight",
    ]


def test_gradient_that_changes_between_backward_and_clipping_is_of_the_gap() -> None:
    lines = message({gradient("a"): times(1.5)}, changed={"a.weight": 0.5})

    assert lines[:2] == [
        "a, parameter weight (backward, step 0) differs from the reference.",
        ("  between the last backward pass and reduce_gradients the gradients of a.weight change"),
    ]
    assert not any("made here" in line for line in lines)


@pytest.mark.parametrize("changed", [{}, {"a.weight": 0.1}, {"b.weight": 0.5}])
def test_change_of_another_size_or_place_explains_no_gradient(changed: dict[str, float]) -> None:
    assert "between" not in " ".join(message({gradient("a"): times(1.5)}, changed=changed))


@pytest.mark.parametrize(
    ("invisible", "changed", "is_gap"),
    [({}, {}, True), (HIDDEN, {"a.weight": 0.5}, True), (HIDDEN, {}, False)],
)
def test_clipping_by_another_factor_in_one_parameter_is_no_clipping(
    invisible: dict[str, str], changed: dict[str, float], is_gap: bool
) -> None:
    # The changed gradient changes the norm, and with it all others.
    wrong = {gradient(module, "clip"): times(1.2 if module == "a" else 0.8) for module in KINDS}
    made = evidence(
        step_results(wrong, missing=[NORM]),
        reports=report(invisible_phases=invisible, changed=changed),
    )
    verdict, _ = judge_training(made)

    words = (
        "between the last backward pass and the optimizer step, where no method shows clipping, the"
        " gradients of a.weight change"
    )
    assert (verdict.levels["gradients"].reason == words) is is_gap


@pytest.mark.parametrize(
    ("factor", "words"), [(0.25, "1/4 of"), (2.0, "2 times"), (0.3, "0.3 times")]
)
@pytest.mark.parametrize("phase", ["backward", "reduce", "clip"])
def test_factor_that_all_gradients_have_in_common_is_told(
    phase: Any, factor: float, words: str
) -> None:
    wrong = {gradient(module, phase): times(factor) for module in KINDS}

    right_norm = (
        "the norm before clipping agrees with the reference's; the factor is wrong (clipped twice, not at all,"
        " or to another max_norm): "
    )
    start = right_norm if phase == "clip" else ""
    assert message(wrong)[1] == f"  {start}all gradients are {words} the reference's"


def test_factor_of_a_wrong_norm_is_no_wrong_factor() -> None:
    wrong = {gradient(module, "clip"): times(0.5) for module in KINDS}

    assert "agrees" not in " ".join(message(wrong | {NORM: times(2.0)}))


@pytest.mark.parametrize(
    ("factor", "words"), [(0.5, "1/2 of"), (1.5, "1.5 times"), (-1.0, "-1 times")]
)
def test_factor_that_most_updates_have_in_common_is_told(factor: float, words: str) -> None:
    wrong = {update(module): times(factor) for module in KINDS}

    assert message(wrong)[1] == f"  most updates are {words} the reference's"


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        ((2.0, 1.0, 1.0), "the reference's times 2 in step 0, 1 in step 1, 1 in step 2"),
        ((1.0, 0.5, 0.25), "the reference's times 1 in step 0, 0.5 in step 1, 0.25 in step 2"),
        ((0.0, 1.0, 1.0), "the reference's times 0 in step 0, 1 in step 1, 1 in step 2"),
    ],
)
def test_factors_of_a_wrong_schedule_are_those_of_each_step(
    factors: tuple[float, ...], words: str
) -> None:
    error = torch.stack([times(factor)[step] for step, factor in enumerate(factors)])

    assert f"  most updates are {words}" in message({update(module): error for module in KINDS})


def test_steps_with_factors_on_both_sides_of_one_name_none() -> None:
    error = torch.stack([times(factor)[step] for step, factor in enumerate((2.0, 0.5, 1.0))])

    lines = message({update(module): error for module in KINDS})
    assert not any("most updates" in line for line in lines)


def test_factor_of_one_update_is_no_common_one() -> None:
    assert not any("most updates" in line for line in message({update("a"): times(0.5)}))


def test_update_after_hidden_clipping_is_not_the_optimizer_s_alone() -> None:
    lines = message({update("a"): WRONG}, invisible_phases={"clip": "the optimizer clips"})

    assert lines[1] == "  clip is not visible: the error is made there, or here"


def test_headline_and_its_suspect_have_one_step() -> None:
    # Half of the largest error is in step 2 alone, and step 1 is over the limit.
    error = torch.cat([rounding()[:1], 0.2 * WRONG[1:2], WRONG[2:]])
    made = evidence(step_results({gradient(module): error for module in KINDS}))
    verdict, _ = judge_training(made)

    assert verdict.location is not None
    assert {one.location.step for one in verdict.suspects} == {verdict.location.step} == {1}
