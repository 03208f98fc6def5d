"""Results of a session: in two sentences, as a line each, and free of hostile text."""

import sys
from pathlib import Path

import pytest

from assay.verdicts import Outcome
from assay_smoke.commands import _tell
from assay_smoke.session.command import (
    CaseResult,
    SessionReport,
    describe_extent,
    describe_outcomes,
    write_page,
)
from assay_smoke.timelines import PhaseSeconds
from packages.core.tests.poison import assert_harmless_html, poisoned


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
    unjudged = CaseResult(name="plain", outcome="ERROR", seconds=1.0, reason="it prints no losses")
    report = _report(passed, unjudged, passed, pairs=(3, 575))

    assert describe_outcomes(report) == "1 ERROR, 2 PASS on cpu"
    assert describe_extent(report) == "3 cases in 2 min 5 s, 3 of 575 pairs of values that can meet"


def test_of_named_cases_no_pairs_are_counted() -> None:
    passed = CaseResult(name="ddp-2", outcome=Outcome.PASS, seconds=1.0)

    assert describe_extent(_report(passed, pairs=(0, 0))) == "1 case in 2 min 5 s"


def test_what_did_not_run_is_named() -> None:
    report = _report(pairs=(0, 575)).model_copy(update={"not_run": ["ddp-2", "fsdp-2"]})
    assert describe_extent(report).endswith("values that can meet; not run: ddp-2, fsdp-2")


def test_a_pass_that_left_something_unchecked_is_counted() -> None:
    whole = CaseResult(name="ddp-2", outcome=Outcome.PASS, seconds=1.0)
    partly = CaseResult(name="plain", outcome=Outcome.PASS, seconds=1.0, reason="equivalent: no")
    report = _report(whole, partly, pairs=(3, 575))
    assert describe_outcomes(report) == "2 PASS (1 left something unchecked) on cpu"


def test_a_result_is_one_line_whose_color_is_not_escaped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = "a" * 100
    result = CaseResult(name=f"{name}\x1b[31m", outcome=Outcome.PASS, seconds=1.0)
    _tell(result, 1, 2, Path("logs"), results=sys.stdout)

    assert capsys.readouterr().out == f"[1/2] PASS {name}\\u001b[31m (1.0 s)\n"


@pytest.mark.parametrize(("total", "command"), [(1, ""), (2, "    assay smoke run c\n")])
def test_a_failure_names_its_logs_and_the_command_of_one_of_several(
    capsys: pytest.CaptureFixture[str], total: int, command: str
) -> None:
    result = CaseResult(
        name="c", outcome=Outcome.FAIL, seconds=1.0, reason="run: hung", command="assay smoke run c"
    )
    _tell(result, 1, total, Path("runs/1/cases/c"), results=sys.stdout)

    told = f"[1/{total}] FAIL c (1.0 s)\n    run: hung\n{command}    logs: runs/1/cases/c\n"
    assert capsys.readouterr().out == told


CASE = CaseResult(
    name="a", outcome=Outcome.FAIL, seconds=1.0, reason="r", diagnosis="d",
    infrastructure="i", tried_again_for="t", command="c", folder="f",
    phases=[PhaseSeconds(world="w", phase="step", number=1, begin=0.0, end=1.0)],
)  # fmt: skip
SESSIONS = dict(
    poisoned(
        SessionReport(
            schema=1, device="cpu", cases=[CASE], seconds=1.0, pairs_covered=1, pairs_possible=2
        )
    )
)


@pytest.mark.parametrize("path", SESSIONS)
def test_no_text_of_a_session_does_anything(path: str, tmp_path: Path) -> None:
    assert len(SESSIONS) >= 9
    assert_harmless_html(write_page(SESSIONS[path], tmp_path).read_text())
