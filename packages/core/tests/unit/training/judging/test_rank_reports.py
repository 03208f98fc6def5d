import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

from assay.training.judging.evidence import _MERGES, merge_reports
from assay.training.processes.trainer_report import FreeRun, TrainerReport
from assay.training.state.precision import KeptPrecision
from assay.training.state.records import StateValue
from packages.core.tests.unit.training.judging.candidate_reports import report, trainer_report


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
