"""Which step, module and parameter a measurement of a training step is of."""

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import pytest
import torch

from assay.comparing.judge import FailedStage, Judged, rank_stages
from assay.stages import Stage
from assay.training.judging.evidence import (
    _MERGES,
    first_bad_step,
    location_of,
    measurement_of,
    merge_reports,
    parameter_of,
)
from assay.training.judging.groups import judge_groups
from assay.training.reports import FreeRun, KeptPrecision, StateValue, TrainerReport
from assay.verdicts import Ratio
from packages.core.tests.unit.training.judging.candidate_reports import report, trainer_report
from packages.core.tests.unit.training.judging.evidence_by_hand import (
    LABELS,
    LOSS,
    LOSS_GRADIENT,
    NOT_A_NUMBER,
    RUN_ROWS,
    UNIT,
    WRONG,
    Place,
    boundary,
    evidence,
    from_step,
    gradient,
    measured,
    output,
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
    merged = merge_reports([report(), report(saved=(head,))])

    assert merged.free.changed_by_saving == [head]


def test_parameters_are_one_if_they_are_on_every_rank() -> None:
    tied = ["head.weight", "embeddings.weight"]

    assert merge_reports([report(shared=(tied,)), report(shared=(tied,))]).model.shared == [tied]
    assert merge_reports([report(shared=(tied,)), report()]).model.shared == []


def test_precision_is_that_of_all_ranks_together() -> None:
    free = FreeRun(kept=KeptPrecision(parameters=["a", "b"]))
    first = trainer_report(free, errors_of_sums={"a": 0.5, "b": 0.0}, narrow_gradients=1)
    free = FreeRun(kept=KeptPrecision(parameters=["b"], rounded=["c"]))
    second = trainer_report(free, errors_of_sums={"a": 0.1, "c": 0.2}, narrow_gradients=2)

    merged = merge_reports([first, second])

    assert merged.free.kept == KeptPrecision(parameters=["a", "b"], rounded=["c"])
    assert merged.gradients.errors_of_sums == {"a": 0.5, "b": 0.0, "c": 0.2}
    assert merged.gradients.narrow_gradients == 3
    assert merge_reports([report(), report()]).free.kept is None


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
