"""A session in two sentences."""

import pytest

from assay.verdicts import Outcome
from assay_smoke.session.results import (
    CaseResult,
    SessionReport,
    describe_extent,
    describe_outcomes,
    format_duration,
)


def _report(*cases: CaseResult, pairs: tuple[int, int]) -> SessionReport:
    return SessionReport(
        schema=1,
        device="cpu",
        cases=list(cases),
        seconds=125.0,
        pairs_covered=pairs[0],
        pairs_possible=pairs[1],
    )


def test_a_case_that_could_not_be_judged_is_no_failure_of_training() -> None:
    passed = CaseResult(name="ddp-2", outcome=Outcome.PASS, seconds=1.0)
    unjudged = CaseResult(
        name="plain", outcome=Outcome.FAIL, seconds=1.0, error="it prints no losses"
    )
    report = _report(passed, unjudged, passed, pairs=(3, 575))

    assert describe_outcomes(report) == "1 ERROR, 2 PASS on cpu"
    assert (
        describe_extent(report) == "3 cases in 2 min 05 s, 3 of 575 pairs of values that can meet"
    )


def test_of_named_cases_no_pairs_are_counted() -> None:
    passed = CaseResult(name="ddp-2", outcome=Outcome.PASS, seconds=1.0)

    assert describe_extent(_report(passed, pairs=(0, 0))) == "1 case in 2 min 05 s"


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.44, "0.4 s"), (59.9, "59.9 s"), (60, "1 min 00 s")]
)
def test_durations_are_told_in_minutes_from_one_on(seconds: float, words: str) -> None:
    assert format_duration(seconds) == words


def test_a_pass_that_left_something_unchecked_is_counted() -> None:
    whole = CaseResult(name="ddp-2", outcome=Outcome.PASS, seconds=1.0)
    partly = CaseResult(name="plain", outcome=Outcome.PASS, seconds=1.0, reason="equivalent: no")
    report = _report(whole, partly, pairs=(3, 575))
    assert describe_outcomes(report) == "2 PASS (1 left something unchecked) on cpu"
