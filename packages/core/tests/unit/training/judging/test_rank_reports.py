import math

from assay.training.judging.evidence import merge_reports
from assay.training.processes.trainer_report import FreeRun
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
