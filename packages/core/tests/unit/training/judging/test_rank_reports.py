from assay.training.judging.rank_reports import merge_reports
from assay.training.state.records import StateValue
from packages.core.tests.unit.training.judging.candidate_reports import report


def test_what_goes_wrong_on_one_rank_has_gone_wrong() -> None:
    head = StateValue("model.head", "model", "head")
    merged = merge_reports([report(), report(saved=(head,))])

    assert merged.free.changed_by_saving == [head]


def test_parameters_are_one_if_they_are_on_every_rank() -> None:
    tied = ["head.weight", "embeddings.weight"]

    assert merge_reports([report(shared=(tied,)), report(shared=(tied,))]).shared == [tied]
    assert merge_reports([report(shared=(tied,)), report()]).shared == []
