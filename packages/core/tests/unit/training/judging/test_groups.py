"""What of two sides' measurements is judged, and by which noise."""

import pytest
import torch

from assay.sites import Phase
from assay.stages import Stage
from assay.training.judging.groups import judge_groups
from packages.core.tests.unit.training.judging.evidence_by_hand import (
    LABELS,
    LOGITS,
    LOSS,
    LOSS_GRADIENT,
    NOT_A_NUMBER,
    UNIT,
    UNTRAINED,
    WRONG,
    Place,
    boundary,
    evidence,
    failed,
    gradient,
    measured,
    output,
    report,
    rounding,
    step_results,
    update,
)

# Over the limit of 3 beside half a unit, and within it beside 4 units.
SIX_UNITS, FOUR_UNITS = rounding(6 * UNIT), rounding(4 * UNIT)


# What is judged


def test_run_like_the_noise_run_is_judged_everywhere_and_fails_nowhere() -> None:
    groups = judge_groups(evidence())

    assert failed(groups) == set()
    ports = {name: len({id(item.port) for item in one.judged}) for name, one in groups.items()}
    assert ports == {
        "stage-inputs": 1, "modules": 5, "stage-forward": 1, "recomputed": 0, "gradients": 5,
        "stage-backward": 3, "stage-reduce": 3, "stage-clip": 4,
        "stage-optimizer": 4 + 1,  # all updates together
    }  # fmt: skip
    assert not any(group.unmatched_expected or group.broken for group in groups.values())


@pytest.mark.parametrize(
    "place",
    [output("norm"), LOSS, boundary("b"), gradient("a"), gradient("a", "reduce"),
     gradient("a", "clip"), update("a")],
)  # fmt: skip
@pytest.mark.parametrize("error", [WRONG, NOT_A_NUMBER], ids=["wrong", "nan"])
def test_error_fails_at_its_place_and_nowhere_else(place: Place, error: torch.Tensor) -> None:
    assert failed(judge_groups(evidence(step_results({place: error})))) == {place}


@pytest.mark.parametrize("place", [LABELS, UNTRAINED])
def test_one_other_value_fails_where_values_are_exact(place: Place) -> None:
    assert failed(judge_groups(evidence(step_results(different=[place])))) == {place}


def test_declared_rounding_of_updates_is_the_unit_roundoff_of_updates_alone() -> None:
    error = {update("a"): SIX_UNITS, gradient("a"): SIX_UNITS}
    declaring = report(update_rounding=8 * UNIT)

    assert failed(judge_groups(evidence(step_results(error)))) == set(error)
    assert failed(judge_groups(evidence(step_results(error), reports=declaring))) == {gradient("a")}
    assert failed(judge_groups(evidence(step_results({update("a"): WRONG}), reports=declaring)))


def test_error_of_one_rank_is_that_rank_s() -> None:
    groups = judge_groups(evidence(step_results(), step_results({output("b"): WRONG})))

    assert {item.port.rank for item in groups["modules"].failed} == {1}


def test_no_error_is_judged_where_the_noise_run_is_not_finite() -> None:
    noise = step_results({output("b"): NOT_A_NUMBER})
    candidate = step_results({output("b"): WRONG, output("a"): WRONG})

    groups = judge_groups(evidence(candidate, noise=noise))

    assert failed(groups) == {output("a")}
    assert groups["modules"].broken == ["b:output"]


def test_port_that_one_rank_does_not_show_is_unmatched() -> None:
    groups = judge_groups(evidence(step_results(), step_results(missing=[gradient("a")])))

    assert groups["stage-backward"].unmatched_expected == ["a:gradient.weight"]


def test_parameter_is_missed_if_no_rank_has_it_and_not_if_one_has() -> None:
    reports = [report(absent=["a.weight", "b.weight"]), report(absent=["a.weight"])]

    groups = judge_groups(evidence(step_results(), step_results(), reports=reports))

    assert groups["stage-optimizer"].unmatched_expected == ["a.weight: on no rank"]


def test_gradients_of_a_router_that_chose_between_equal_scores_are_left_out_with_a_note() -> None:
    candidate = step_results(
        {boundary("a"): WRONG, gradient("a"): WRONG, update("a"): WRONG, boundary("b"): WRONG}
    )
    candidate["modules"].ports["a", "output"].exact.num_near_ties = 1

    groups = judge_groups(evidence(candidate))

    assert failed(groups) == {update("a"), boundary("b")}
    for name in ("gradients", "stage-backward"):
        (note,) = groups[name].notes
        assert note.startswith("gradients of a are not judged: routing choices differ there")


# By which noise


def test_phase_that_is_seen_late_may_round_as_the_unseen_one_before_it_does() -> None:
    noise = step_results({gradient("a", "clip"): FOUR_UNITS})
    candidate = step_results({update("a"): SIX_UNITS, update("b"): SIX_UNITS})
    hidden = report(invisible_phases={"clip": "done by the optimizer"})

    groups = judge_groups(evidence(candidate, noise=noise, reports=hidden))

    assert failed(groups) == {update("b")}


@pytest.mark.parametrize("invisible", [[], ["backward"]])
def test_phase_that_is_seen_excuses_no_later_one(invisible: list[Phase]) -> None:
    noise = step_results({gradient("a", "clip"): FOUR_UNITS})
    hidden = report(invisible_phases=dict.fromkeys(invisible, "fused"))

    groups = judge_groups(
        evidence(step_results({update("a"): SIX_UNITS}), noise=noise, reports=hidden)
    )

    assert failed(groups) == {update("a")}


def test_reduction_that_is_unseen_is_over_with_backward_and_excuses_no_later_phase() -> None:
    noise = step_results({gradient("a", "reduce"): FOUR_UNITS})
    candidate = step_results({gradient("a", "clip"): SIX_UNITS})
    hidden = report(invisible_phases={"reduce": "fused"})

    groups = judge_groups(evidence(candidate, noise=noise, reports=hidden))

    assert failed(groups) == {gradient("a", "clip")}


def test_unseen_phase_is_counted_once_and_not_in_all_that_follow() -> None:
    noise = step_results({gradient("a"): FOUR_UNITS})
    candidate = step_results({gradient("a", "reduce"): SIX_UNITS, update("a"): SIX_UNITS})
    hidden = report(invisible_phases={"backward": "fused"})

    assert failed(judge_groups(evidence(candidate, noise=noise, reports=hidden))) == {update("a")}


@pytest.mark.parametrize(("uncalled_modules", "wrong"), [(["b"], set()), ([], {gradient("b")})])
def test_no_gradient_is_injected_for_parameters_of_a_module_that_is_never_called(
    uncalled_modules: list[str], wrong: set[Place]
) -> None:
    """What comes to the module is rounded, and handed on as it is."""
    noise = step_results({("gradients", "b", "output"): FOUR_UNITS})
    candidate = step_results({gradient("b"): SIX_UNITS})
    candidate["modules"].uncalled_modules = uncalled_modules

    assert failed(judge_groups(evidence(candidate, noise=noise))) == wrong


@pytest.mark.parametrize(("size", "wrong"), [(64.0, set()), (1.0, {LOSS_GRADIENT})])
def test_loss_may_round_its_largest_logits_to_float32(size: float, wrong: set[Place]) -> None:
    # Of 64, half a unit is 2^-19: the error is twice that. Of 1 it is 2^-25.
    noise = step_results(
        dict.fromkeys((LOSS_GRADIENT, boundary("b")), rounding(2.0**-25)), dtype="float32"
    )
    noise["modules"].ports["", "output.logits"] = measured(LOGITS, rounding(), size, "float32")
    small = rounding(2.0**-18)
    candidate = step_results({LOSS_GRADIENT: small, boundary("b"): small}, dtype="float32")

    groups = judge_groups(evidence(candidate, noise=noise, dtype="float32"))

    # What a module hands back has no such excuse.
    assert failed(groups) == wrong | {boundary("b")}


@pytest.mark.parametrize(
    ("uncalled_modules", "wrong"),
    [(["b"], set()), ([], {gradient("b")})],
    ids=["fused", "called"],
)
def test_head_that_is_fused_with_the_loss_rounds_as_the_loss_does(
    uncalled_modules: list[str], wrong: set[Place]
) -> None:
    # As above: of logits of 64, twice half a unit.
    small = {gradient("b"): rounding(2.0**-25), ("gradients", "b", "output"): rounding(2.0**-25)}
    noise = step_results(small, dtype="float32")
    noise["modules"].ports["b", "output"] = measured(
        ("modules", "b", "output.logits"), rounding(), 64.0, "float32", stage=Stage("b")
    )
    candidate = step_results({gradient("b"): rounding(2.0**-18)}, dtype="float32")
    candidate["modules"].uncalled_modules = uncalled_modules

    groups = judge_groups(evidence(candidate, noise=noise, dtype="float32"))

    assert failed(groups) & {gradient("b")} == wrong


@pytest.mark.parametrize("whole", [True, False], ids=["whole model", "stage of a pipeline"])
def test_gradient_of_the_loss_is_judged_by_its_own_noise_where_it_arrives(whole: bool) -> None:
    noise = step_results({LOSS_GRADIENT: FOUR_UNITS})
    candidate = step_results(missing=[] if whole else [LOSS_GRADIENT])
    head: Place = ("gradients", "head", "output.logits")
    arrived = measured(head, SIX_UNITS, stage=Stage("", "backward"))
    candidate["gradients"].ports["head", "output.logits"] = arrived

    assert failed(judge_groups(evidence(candidate, noise=noise))) == ({head} if whole else set())


def test_ports_are_in_the_order_of_a_step_whichever_group_they_are_of() -> None:
    groups = judge_groups(evidence()).values()
    orders = [port.order for group in groups for port in group.ports]

    assert orders == list(range(26))
