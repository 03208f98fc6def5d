from assay.training.merging import merge_reports
from assay.training.requests import CandidateReport, FreeRun


def report(*shared: list[str], saved: tuple[str, ...] = ()) -> CandidateReport:
    return CandidateReport(
        run={},
        free=FreeRun(changed_by_saving=list(saved)),
        seen=[],
        invisible={},
        weights_different=[],
        not_in_optimizer=[],
        shared=list(shared),
        not_taken=[],
    )


def test_what_goes_wrong_on_one_rank_has_gone_wrong() -> None:
    merged = merge_reports([report(), report(saved=("model.head",))])

    assert merged.free.changed_by_saving == ["model.head"]


def test_parameters_are_one_if_they_are_on_every_rank() -> None:
    tied = ["head.weight", "embeddings.weight"]

    assert merge_reports([report(tied), report(tied)]).shared == [tied]
    assert merge_reports([report(tied), report()]).shared == []
