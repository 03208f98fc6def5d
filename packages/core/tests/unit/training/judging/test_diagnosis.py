"""What is wrong, by which measured values are: each diagnosis beside what only looks like it."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.replay.gradients import GradientScale, ScaledStep
from assay.sites import Phase
from assay.training.judging.diagnosis import describe_early_clipping, is_clipped_in_reduce
from assay.training.judging.verdict import judge_training
from assay.training.reports import GradientNorm, GradientShare, TrainerReport
from assay.verdicts import Outcome, Verdict
from packages.core.tests.unit.training.judging.evidence_by_hand import (
    KINDS,
    LABELS,
    LOSS,
    LOSS_GRADIENT,
    NORM,
    NOT_A_NUMBER,
    STEPS,
    UNIT,
    WRONG,
    Place,
    boundary,
    diagnosed,
    evidence,
    free_run,
    from_step,
    gradient,
    judged,
    measured,
    output,
    report,
    rounding,
    step_results,
    times,
    trajectory,
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
    ("first", "found", "when"),
    [
        (1.0, 1.7, "the first micro-batch"),  # each micro-batch by itself
        (1.004, 1.003, "the first micro-batch"),  # all that was added up so far
        (math.nan, 1.0, "backward"),
        (0.8, 1.7, None),
        (1.02, 1.7, None),
        (math.nan, math.nan, None),
    ],
)
def test_norms_at_the_limit_are_those_of_clipped_gradients(
    first: float, found: float, when: str | None
) -> None:
    words = (
        when and f"after {when} the gradients have the clipping norm, 1: they are clipped too early"
    )
    assert describe_early_clipping([rank(("backward", first, found, 3.0))]) == words


def test_every_rank_has_to_have_clipped_and_every_step() -> None:
    clipped: Norm = ("backward", 1.0, 1.0, 3.0)
    other: Norm = ("backward", 2.0, 2.0, 3.0)

    assert describe_early_clipping([rank(clipped), rank(clipped)])
    assert not describe_early_clipping([rank(clipped), rank(other)])
    assert not describe_early_clipping([report()])


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


def test_each_micro_batch_clipped_is_no_wrong_share() -> None:
    shares = [
        GradientShare(step=step, source=source, share=share)
        for step in range(STEPS)
        for source, share in ((0, 0.19), (1, 0.65))
    ]
    clipped = rank(("backward", 1.0, 1.0, 3.0))
    clipped.gradients.shares = shares

    changed = wrong_in("backward", 0.5, 0.3, 0.7)
    finding = diagnosed(evidence(step_results(changed), reports=clipped))
    assert finding.diagnosis == "clip-norm"
    assert (
        finding.reason
        == "after the first micro-batch the gradients have the clipping norm, 1: they are clipped too early"
    )


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


def judged_without_scale(
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
    verdict = judged_without_scale({}, **step)

    assert verdict.verdict is Outcome.PASS
    assert note in verdict.notes


def test_scale_that_nothing_takes_off_is_an_error_of_the_loss() -> None:
    moments_too_large: Changed = {update(module): times(FACTOR) for module in KINDS}

    # Clipping gives gradients of all lengths the same: only the norm shows the factor.
    for verdict in (
        judged_without_scale({NORM: times(FACTOR)}, norm=FACTOR, taken_off="clip"),
        judged_without_scale(moments_too_large),
    ):
        assert verdict.verdict is Outcome.FAIL
        assert told(verdict) == ("loss-scale", "forward")


@pytest.mark.parametrize("later", [CLIPPED, UPDATED], ids=["in clip", "in the optimizer's phase"])
def test_scale_that_is_taken_off_after_clipping_is_a_wrong_norm(later: Changed) -> None:
    verdict = judged_without_scale({NORM: times(FACTOR), **later}, norm=FACTOR, taken_off="clip")

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
    assert told(judged_without_scale(reduced, taken_off="reduce", left=left)) == (
        diagnosis,
        "reduce",
    )


@pytest.mark.parametrize("factor", [FACTOR, 10.0])  # only the power of two rounds nothing
def test_scale_that_is_taken_off_by_another_factor_is_one(factor: float) -> None:
    halved = times(0.5)
    reduced: Changed = {gradient(module, "reduce"): halved for module in KINDS}

    assert told(judged_without_scale(reduced, taken_off="reduce", factor=factor)) == (
        "loss-scale",
        "reduce",
    )
    assert told(judged_without_scale({NORM: halved}, norm=0.5, taken_off="clip")) == (
        "loss-scale",
        "clip",
    )


def test_norm_that_is_wrong_beside_a_right_scale_is_a_wrong_norm() -> None:
    verdict = judged_without_scale({NORM: times(0.5)}, norm=None, taken_off="reduce")

    assert told(verdict) == ("clip-norm", "clip")


@pytest.mark.parametrize(
    ("norm", "outcome"), [(1.0, Outcome.PASS), (FACTOR, Outcome.FAIL), (None, Outcome.FAIL)]
)
def test_clipping_that_nobody_sees_needs_a_norm_to_show_that_the_scale_was_off(
    norm: float | None, outcome: Outcome
) -> None:
    assert (
        judged_without_scale({}, norm=norm, invisible={"clip": "the optimizer clips"}).verdict
        is outcome
    )


def test_error_beside_a_scale_is_found_at_its_place() -> None:
    verdict = judged_without_scale({gradient("b"): times(1.5)}, taken_off="reduce")

    assert verdict.verdict is Outcome.FAIL
    assert verdict.location is not None
    assert (verdict.diagnosis, verdict.location.module) == ("module-error", "b")


def reported(changed: Changed, *ranks: Changed) -> tuple[str, str | None, str | None]:
    """Diagnosis, module and parameter of what one process measured, or several."""
    finding = diagnosed(evidence(step_results(changed), *map(step_results, ranks)))
    return finding.diagnosis, finding.location.module, finding.location.parameter


def scales(*pairs: tuple[float, float]) -> list[GradientScale]:
    """The slope and the rest of each micro-batch of a step."""
    return [
        GradientScale(step=0, micro_batch=number, slope=slope, rest=rest)
        for number, (slope, rest) in enumerate(pairs)
    ]


@pytest.mark.parametrize("place", [output("b"), boundary("b"), gradient("b", "clip"), update("b")])
def test_nan_is_not_finite_in_whichever_phase_it_is_made(place: Place) -> None:
    finding = diagnosed(evidence(step_results({place: from_step(1, NOT_A_NUMBER)})))

    assert (finding.diagnosis, finding.location.module) == ("non-finite", "b")
    assert finding.location.step == 1


def test_other_labels_are_other_inputs() -> None:
    finding = diagnosed(evidence(step_results(different=[LABELS])))

    assert (finding.diagnosis, finding.location.phase) == ("inputs-differ", "inputs")


# Weights


def test_module_that_computes_with_other_weights_is_not_what_is_wrong() -> None:
    made = evidence(
        step_results({output("b"): WRONG}), reports=report(weights_different=["a.weight", "b.bias"])
    )

    finding = diagnosed(made)

    assert finding.diagnosis == "weight-mismatch"
    assert finding.location.parameter == "b.bias"


@pytest.mark.parametrize(
    ("place", "diagnosis"),
    [(output("norm"), "module-error"), (update("b"), "optimizer-update")],
)
def test_other_weights_explain_nothing_of_other_modules_and_phases(
    place: Place, diagnosis: str
) -> None:
    different = report(weights_different=["b.weight"])

    finding = diagnosed(evidence(step_results({place: WRONG}), reports=different))

    assert finding.diagnosis == diagnosis


def test_weights_that_show_in_the_first_update_alone_differed_before_it() -> None:
    at_first = torch.cat([WRONG[:1], rounding()[1:]])
    changed = step_results({update("b"): at_first})

    different = diagnosed(evidence(changed, reports=report(weights_different=["b.weight"])))
    others = diagnosed(evidence(changed, reports=report(weights_different=["a.weight"])))

    assert (different.diagnosis, different.location.phase) == ("weight-mismatch", "forward")
    assert (different.location.module, different.location.parameter) == ("b", "b.weight")
    assert others.diagnosis == "optimizer-update"


@pytest.mark.parametrize(
    ("different", "diagnosis", "parameter"),
    [
        ([], "optimizer-update", None),
        (["a.weight", "b.weight"], "weight-mismatch", "b.weight"),
        (["tokens.weight"], "weight-mismatch", "tokens.weight"),
    ],
)
def test_run_that_ends_elsewhere_from_other_weights_is_no_matter_of_updates(
    different: list[str], diagnosis: str, parameter: str | None
) -> None:
    free = free_run(trajectory=trajectory(b=64 * UNIT), resumed_trajectory=trajectory(b=64 * UNIT))

    verdict = judged(step_results(), reports=report(free, weights_different=different))

    assert verdict.diagnosis == diagnosis
    assert verdict.location is not None
    assert verdict.location.parameter == parameter


@pytest.mark.parametrize("place", [output("b"), gradient("a"), update("a")])
def test_copy_of_a_shared_table_is_named_wherever_it_shows(place: Place) -> None:
    pair = ["head.weight", "tokens.weight"]
    changed = step_results({place: WRONG})

    finding = diagnosed(evidence(changed, shared=[pair], reports=report(shared=[])))
    assert finding.diagnosis == "untied-parameters"
    assert (finding.location.module, finding.location.parameter) == ("head", "head.weight")

    finding = diagnosed(evidence(changed, shared=[pair], reports=report(shared=[pair])))
    assert finding.diagnosis != "untied-parameters"


def test_parameter_that_does_not_move_explains_the_gradient_that_it_does_not_have() -> None:
    changed = {gradient("a"): times(0.0), update("a"): times(0.0)}

    assert reported(changed) == ("frozen-parameters", "a", "a.weight")


def test_parameters_that_all_stand_still_are_of_no_module() -> None:
    changed = {update(module): times(0.0) for module in KINDS}

    assert reported(changed) == ("frozen-parameters", None, None)


def test_parameter_that_rounding_keeps_still_in_the_noise_run_too_is_not_frozen() -> None:
    noise = step_results({update("a"): times(0.0)})
    candidate = step_results({update("a"): times(0.0), update("b"): WRONG})

    finding = diagnosed(evidence(candidate, noise=noise))

    assert (finding.diagnosis, finding.location.parameter) == ("optimizer-update", "b.weight")


def test_parameter_that_the_reference_does_not_move_either_is_not_frozen() -> None:
    candidate = step_results({update("b"): WRONG})
    still = measured(update("a"), rounding(0.0), size=0.0)
    candidate["stage-optimizer"].ports["a", "update.weight"] = still

    assert diagnosed(evidence(candidate)).location.parameter == "b.weight"


@pytest.mark.parametrize(
    "error",
    [times(1e-3), times(2.0), times(0.0) + rounding(0.5)],
    ids=["too short", "too long", "at right angles"],
)
def test_parameter_that_moves_otherwise_is_not_frozen(error: Tensor) -> None:
    assert reported({update("a"): error}) == ("optimizer-update", "a", "a.weight")


def test_parameter_that_the_optimizer_does_not_hold_is_frozen() -> None:
    made = evidence(step_results({update("b"): WRONG}), reports=report(not_in_optimizer=["b.bias"]))

    assert diagnosed(made).diagnosis == "frozen-parameters"
    assert diagnosed(made).location.parameter == "b.bias"


def test_parameter_that_should_not_be_trained_is_reported_before_what_it_affects() -> None:
    made = evidence(
        step_results({output("b"): WRONG}), reports=report(unexpectedly_trained=["base.weight"])
    )

    finding = diagnosed(made)

    assert (finding.diagnosis, finding.location.parameter) == ("optimizer-update", "base.weight")


# The loss


@pytest.mark.parametrize(
    ("pairs", "diagnosis"),
    [
        ([(1.0, 0.0), (1.0, 0.019)], "loss-scale"),
        ([(1.0, 0.0), (0.0, 0.0)], "loss-scale"),  # one micro-batch of two
        ([(-0.5, 0.009)], "loss-scale"),
        ([(1.0, 0.0), (1.0, 0.021)], "module-error"),  # more than a length is wrong
        ([(1.0, math.nan)], "module-error"),
        ([(3 * UNIT, 0.0)], "module-error"),  # no more than rounding
        ([], "module-error"),  # nothing was seen
    ],
)
@pytest.mark.parametrize("place", [LOSS, LOSS_GRADIENT])
def test_loss_of_another_length_is_scaled_if_each_micro_batch_s_gradient_is(
    place: Place, pairs: list[tuple[float, float]], diagnosis: str
) -> None:
    made = evidence(
        step_results({place: times(2.0)}), reports=report(logit_gradients=scales(*pairs))
    )

    finding = diagnosed(made)

    assert (finding.diagnosis, finding.location.op) == (diagnosis, "loss")
    assert finding.location.phase == ("forward" if place == LOSS else "backward")


def test_gradient_that_the_model_hands_to_a_child_is_not_the_loss_s() -> None:
    made = evidence(
        step_results({("gradients", "b", "output"): WRONG}),
        reports=report(logit_gradients=scales((1.0, 0.0))),
    )

    assert (diagnosed(made).diagnosis, diagnosed(made).location.module) == ("module-error", "")


# Modules


@pytest.mark.parametrize("place", [output("b"), boundary("b")])
def test_parts_that_add_up_over_ranks_are_a_reduction_that_is_missing(place: Place) -> None:
    assert reported({place: times(0.7)}, {place: times(0.3)})[0] == "missing-reduction"


@pytest.mark.parametrize("place", [output("b"), boundary("b")])
@pytest.mark.parametrize(
    "factors",
    [(0.7,), (0.5, 0.5), (0.7, 0.5)],
    ids=["one process", "alike", "more than the whole"],
)
def test_wrong_length_of_a_module_s_values_is_the_module_s(
    place: Place, factors: tuple[float, ...]
) -> None:
    first, *others = [{place: times(factor)} for factor in factors]

    assert reported(first, *others)[:2] == ("module-error", "b")


@pytest.mark.parametrize(("drew", "diagnosis"), [(True, "rng-state"), (False, "module-error")])
def test_backward_that_draws_numbers_of_its_own_is_recognised_by_them(
    drew: bool, diagnosis: str
) -> None:
    made = evidence(step_results({boundary("b"): WRONG}), reports=report(drew_in_backward=drew))

    assert (diagnosed(made).diagnosis, diagnosed(made).location.module) == (diagnosis, "b")


def test_numbers_that_are_drawn_in_backward_are_no_excuse_for_the_forward_pass() -> None:
    made = evidence(step_results({output("b"): WRONG}), reports=report(drew_in_backward=True))

    assert diagnosed(made).diagnosis == "module-error"


# Gradients of parameters


def gradients(*errors: Tensor, phase: str = "backward") -> Changed:
    """Of `a`, `norm` and `b`."""
    return {
        (f"stage-{phase}", module, "gradient.weight"): error
        for module, error in zip(KINDS, errors, strict=False)
    }


def test_sums_that_are_all_wrong_by_one_factor_are_a_scale_of_the_loss() -> None:
    assert reported(gradients(times(0.5), times(0.5), times(0.5))) == ("loss-scale", None, None)


@pytest.mark.parametrize(
    "errors",
    [(times(0.5), times(0.3), times(0.7)), (times(0.5) + rounding(0.25),) * 3],
    ids=["factors of their own", "more than a factor"],
)
def test_sums_that_are_wrong_by_more_than_one_factor_lack_a_part(
    errors: tuple[Tensor, ...],
) -> None:
    lost = dict.fromkeys(("a.weight", "norm.weight", "b.weight"), 0.5)

    assert summed(gradients(*errors), lost) == ("missing-reduction", None)


# As a rounded sum, and one that lacks a part, are off.
ROUNDED, LOST = UNIT, 0.5


@pytest.mark.parametrize("wrong", [("a",), ("a", "norm"), ("a", "norm", "b")])
def test_what_is_wrong_of_any_number_of_gradients_is_decided_by_their_sums(
    wrong: tuple[str, ...],
) -> None:
    changed = {gradient(module): WRONG for module in wrong}
    right = {f"{module}.weight": ROUNDED for module in KINDS}
    lost = right | {f"{module}.weight": LOST for module in wrong}

    # Each sum is of what backward gave: then backward gives something else.
    assert summed(changed, right)[0] == "module-error"
    everywhere = len(wrong) == len(KINDS)
    assert summed(changed, lost) == ("missing-reduction", None if everywhere else "a.weight")


def test_sum_of_another_parameter_explains_no_gradient() -> None:
    right = {f"{module}.weight": ROUNDED for module in KINDS}

    assert summed({gradient("a"): WRONG}, right | {"b.weight": LOST}) == (
        "module-error",
        "a.weight",
    )


def test_gradients_of_which_no_sum_was_seen_are_their_module_s() -> None:
    assert summed(gradients(WRONG, WRONG, WRONG), {})[0] == "module-error"


def summed(changed: Changed, errors_of_sums: dict[str, float]) -> tuple[str, str | None]:
    """Diagnosis and parameter, where `.grad` is so far from the sum of what backward gave."""
    reports = report(errors_of_sums=errors_of_sums)
    finding = diagnosed(evidence(step_results(changed), reports=reports))
    return finding.diagnosis, finding.location.parameter


def test_wrong_sums_with_a_wrong_boundary_are_located_at_the_boundary() -> None:
    changed = {boundary("b"): WRONG, **gradients(times(0.5), times(0.5), times(0.5))}

    assert reported(changed)[:2] == ("module-error", "b")


def test_only_norms_gradients_wrong_are_a_sum_over_tokens_that_is_missing() -> None:
    assert reported({gradient("norm"): WRONG})[0] == "missing-reduction"
    assert reported({gradient("b"): WRONG})[0] == "module-error"
    # What a norm hands back is no parameter's.
    assert reported({boundary("norm"): WRONG, gradient("norm"): WRONG})[0] == "module-error"


@pytest.mark.parametrize(
    ("errors", "finding"),
    [
        ((times(2.0), times(2.0), times(2.0)), ("loss-scale", None, None)),
        ((times(2.0), times(2.09), times(2.0)), ("loss-scale", None, None)),  # alike to a tenth
        ((times(2.0), times(2.2), times(2.0)), ("missing-reduction", "b", "b.weight")),
        ((times(0.5),), ("missing-reduction", "a", "a.weight")),
        ((times(0.94),), ("missing-reduction", "a", "a.weight")),
        ((times(0.96),), ("module-error", "a", "a.weight")),  # less than a rank's part
    ],
)
def test_reduction_is_recognised_by_whether_all_sums_or_some_are_wrong_and_how_much(
    errors: tuple[Tensor, ...], finding: tuple[str, str | None, str | None]
) -> None:
    assert reported(gradients(*errors, phase="reduce")) == finding


def test_clip_is_of_no_module() -> None:
    assert reported({gradient("a", "clip"): WRONG}) == ("clip-norm", None, None)
    assert reported({NORM: times(2.0)}) == ("clip-norm", None, None)


def test_update_is_of_its_parameter_unless_most_are_wrong() -> None:
    one = {update("a"): times(2.0)}
    assert reported(one) == ("optimizer-update", "a", "a.weight")

    # Of four modules: the model itself has values of the optimizer, too.
    two = one | {update("b"): times(2.0)}
    assert reported(two) == ("optimizer-update", "a", "a.weight")
    assert reported(two | {update("norm"): times(2.0)}) == ("optimizer-update", None, None)
