"""Which step, module and parameter a measurement of a training step is of."""

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import pytest
import torch

from assay.judge.replays import FailedStage, Judged, rank_stages
from assay.sites import Phase
from assay.stages import Stage
from assay.training.judging.evidence import (
    _MERGES,
    first_bad_step,
    location_of,
    measurement_of,
    merge_reports,
    parameter_of,
)
from assay.training.judging.judged_groups import judge_groups
from assay.training.reports import FreeRun, KeptPrecision, StateValue, TrainerReport
from assay.verdicts import Ratio
from packages.core.tests.unit.training.judging.candidate_reports import report as rank_report
from packages.core.tests.unit.training.judging.candidate_reports import trainer_report
from packages.core.tests.unit.training.judging.evidence_by_hand import (
    LABELS,
    LOGITS,
    LOSS,
    LOSS_GRADIENT,
    NOT_A_NUMBER,
    RUN_ROWS,
    UNIT,
    UNTRAINED,
    WRONG,
    Place,
    boundary,
    evidence,
    failed,
    from_step,
    gradient,
    measured,
    output,
    report,
    rounding,
    step_results,
    times,
    update,
)


def stage_of(made: Judged) -> FailedStage:
    (stage,) = rank_stages([made])
    return stage


def one(place: Place, error: torch.Tensor) -> Judged:
    """The error at a place as it is judged."""
    port = measured(place, error)
    return Judged.of(Ratio("replay-tensor", port.sums.relative_error, UNIT / 2), 3.0, port)


@pytest.mark.parametrize(
    ("error", "step"),
    [
        (WRONG, 0),
        (from_step(2, WRONG), 2),
        (from_step(1, NOT_A_NUMBER), 1),
        # The limit is 1.5 units: 1.28 of the first step are below it, 1.92 of the second above it.
        (torch.cat([0.04 * WRONG[:1], 0.06 * WRONG[1:2], WRONG[2:]]), 1),
    ],
)
def test_first_bad_step_is_the_first_over_its_limit(error: torch.Tensor, step: int) -> None:
    assert first_bad_step(one(output("a"), error), RUN_ROWS) == step


def test_first_bad_step_of_exact_values_is_the_first_that_differs() -> None:
    (made,) = judge_groups(evidence(step_results(different=[LABELS])))["stage-inputs"].failed

    assert first_bad_step(made, RUN_ROWS) == 1


def test_row_says_whose_port_it_is_and_no_step_where_nothing_is_wrong() -> None:
    wrong, fine = from_step(2, WRONG), from_step(2, rounding(1.25 * UNIT))
    made = measured(("gradients", "b", "output"), wrong)
    row = measurement_of(
        "gradients", Judged.of(Ratio("replay-tensor", 1.0, 0.5), 1.5, made), RUN_ROWS
    )

    assert (row.module, row.port, row.phase, row.step) == ("", "b:output", "backward", 2)
    assert (row.actual, row.expected, row.ratio, row.limit) == (1.0, 0.5, 2.0, 1.5)
    row = measurement_of("activations", one(output("a"), fine), RUN_ROWS)
    assert (row.module, row.port, row.step) == ("a", "output", 0)


def test_place_of_a_module_s_backward_has_the_parameter_that_is_worst() -> None:
    bias = measured(gradient("a"), 2 * WRONG)
    bias.port = "gradient.bias"
    items = [
        one(boundary("a"), WRONG),
        one(gradient("a"), WRONG),
        Judged.of(Ratio("replay-tensor", 1.0, UNIT / 2), 3.0, bias),
        Judged.of(Ratio("replay-tensor", 9.0, UNIT / 2), 3.0, measured(gradient("b"), WRONG)),
    ]
    stage = next(stage for stage in rank_stages(items) if stage.stage.module == "a")

    place = location_of(stage, items, RUN_ROWS)

    assert (place.phase, place.module, place.parameter) == ("backward", "a", "a.bias")


@pytest.mark.parametrize(
    ("place", "op"), [(LOSS, "loss"), (LOSS_GRADIENT, "loss"), (output("b"), None)]
)
def test_what_the_loss_makes_is_said_to_be_the_loss_s(place: Place, op: str | None) -> None:
    made = one(place, times(2.0))

    assert location_of(stage_of(made), [made], RUN_ROWS).op == op


def test_parameter_of_the_model_itself_has_no_module_before_its_name() -> None:
    made = measured(update("a"), WRONG)
    item = Judged.of(Ratio("replay-tensor", 1.0, 0.5), 1.0, made)
    assert parameter_of(item) == "a.weight"

    made.stage = Stage("", "optimizer")
    assert parameter_of(item) == "weight"


def test_what_goes_wrong_on_one_rank_has_gone_wrong() -> None:
    head = StateValue("model.head", "model", "head")
    merged = merge_reports([rank_report(), rank_report(saved=(head,))])

    assert merged.free.changed_by_saving == [head]


def test_parameters_are_one_if_they_are_on_every_rank() -> None:
    tied = ["head.weight", "embeddings.weight"]

    assert merge_reports(
        [rank_report(shared=(tied,)), rank_report(shared=(tied,))]
    ).model.shared == [tied]
    assert merge_reports([rank_report(shared=(tied,)), rank_report()]).model.shared == []


def test_precision_is_that_of_all_ranks_together() -> None:
    free = FreeRun(kept=KeptPrecision(parameters=["a", "b"]))
    first = trainer_report(free, errors_of_sums={"a": 0.5, "b": 0.0}, narrow_gradients=1)
    free = FreeRun(kept=KeptPrecision(parameters=["b"], rounded=["c"]))
    second = trainer_report(free, errors_of_sums={"a": 0.1, "c": 0.2}, narrow_gradients=2)

    merged = merge_reports([first, second])

    assert merged.free.kept == KeptPrecision(parameters=["a", "b"], rounded=["c"])
    assert merged.gradients.errors_of_sums == {"a": 0.5, "b": 0.0, "c": 0.2}
    assert merged.gradients.narrow_gradients == 3
    assert merge_reports([rank_report(), rank_report()]).free.kept is None


def test_a_nan_of_one_rank_is_the_worst_error_of_all() -> None:
    ranks = [
        trainer_report(FreeRun(), errors_of_sums={"a": error}) for error in (0.1, math.nan, 0.2)
    ]
    assert math.isnan(merge_reports(ranks).gradients.errors_of_sums["a"])


# Equal on all ranks, or read from the report of each rank.
OF_RANK_0 = {
    "absent", "changes", "compared", "coordinates", "dropout_masks", "generators_compared", "held",
    "hidden", "inexact_resume", "layout", "load", "masks", "micro_batches_run", "norms",
    "rank_shares", "resumed", "resumed_trajectory", "run", "saved_compared", "scheduled_module",
    "shares", "steps", "trajectory", "update_rounding",
}  # fmt: skip


def names_in(record: object) -> Iterator[str]:
    for one in fields(record):  # type: ignore[arg-type]
        value = getattr(record, one.name)
        if is_dataclass(value):
            yield from names_in(value)
        else:
            yield one.name


def test_a_new_fact_of_a_rank_is_merged_or_declared_to_be_that_of_rank_0() -> None:
    names = {*names_in(TrainerReport(run={}, free=FreeRun(kept=KeptPrecision())))}

    assert names - set(_MERGES) == OF_RANK_0
    assert set(_MERGES) - names == set()


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
