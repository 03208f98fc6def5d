"""Which of several ranks decides."""

import pytest

from assay.generate.judging.verdict import Judgement, merge_weight_facts, worst_of_ranks
from assay.generate.processes.requests import CandidateReport
from assay.verdicts import Location, Measurement, Outcome, Verdict

ROW = Measurement(
    level="modules", module="m", port="output", statistic="s", actual=1, expected=1, ratio=1
)


def judgement(outcome: Outcome, ratio: float | None = 1.0) -> Judgement:
    location = Location(phase="forward", module="m") if outcome is Outcome.FAIL else None
    verdict = Verdict(verdict=outcome, location=location, noise_ratio=ratio, limit=2.0)
    return Judgement(verdict, [ROW], [], None)


@pytest.mark.parametrize(
    ("outcomes", "worst", "note"),
    [
        (["PASS", "FAIL", "PASS"], 1, "each of 3 ranks is judged; FAIL: rank 1"),
        (["NOT_COMPARED", "PASS"], 0, "each of 2 ranks is judged; NOT_COMPARED: rank 0"),
        (["NOT_COMPARED", "FAIL"], 1, "each of 2 ranks is judged; FAIL: rank 1"),
        (["PASS", "PASS"], 0, "each of 2 ranks is judged; PASS: all"),
    ],
)
def test_the_worst_rank_decides(outcomes: list[str], worst: int, note: str) -> None:
    found = worst_of_ranks([judgement(Outcome(outcome)) for outcome in outcomes])

    assert found.verdict.verdict.value == outcomes[worst]
    assert found.verdict.notes == [note]
    assert [row.rank for row in found.measurements] == [worst]
    if found.verdict.location is not None:
        assert found.verdict.location.rank == worst


def test_where_all_ranks_fail_none_is_named() -> None:
    found = worst_of_ranks([judgement(Outcome.FAIL, 5.0), judgement(Outcome.FAIL, 9.0)])

    assert found.verdict.noise_ratio == 9.0
    assert found.verdict.location is not None
    assert found.verdict.location.rank == 0


def test_rank_with_the_place_decides_and_is_named_where_all_fail() -> None:
    """An error of one rank reaches the logits of all, by a larger ratio than at its place."""
    everywhere = judgement(Outcome.FAIL, 1e9)
    everywhere.verdict.location = None

    found = worst_of_ranks([everywhere, judgement(Outcome.FAIL, 5.0), everywhere])

    assert found.verdict.location is not None
    assert (found.verdict.location.module, found.verdict.location.rank) == ("m", 1)
    assert found.verdict.notes == ["each of 3 ranks is judged; FAIL: all"]


def test_a_ratio_that_is_no_number_is_the_worst() -> None:
    ranks = [judgement(Outcome.FAIL, 1e9), judgement(Outcome.FAIL, float("nan"))]

    assert [row.rank for row in worst_of_ranks(ranks).measurements] == [1]


def test_weights_that_differ_on_one_rank_explain_what_all_ranks_see() -> None:
    reports = [
        CandidateReport(run={}, deterministic=True, spread=spread, weights_different=different)
        for spread, different in ((0.0, []), (1.0, ["a.weight"]))
    ]

    united = merge_weight_facts(reports)

    assert [report.weights_different for report in united] == [["a.weight"], ["a.weight"]]
    assert [report.spread for report in united] == [0.0, 1.0]
