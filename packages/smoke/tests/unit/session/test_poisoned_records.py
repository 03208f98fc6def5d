"""Hostile text in results of a session or of data checks reaches no output format."""

import io
from pathlib import Path

import pytest

from assay.output.console import open_text_console
from assay.verdicts import Level, Outcome, Verdict
from assay_smoke.data.command.verdict import print_data_verdict
from assay_smoke.session.results import CaseResult, PhaseSeconds, SessionReport, write_page
from packages.core.tests.poison import assert_harmless_html, assert_harmless_text, poisoned

CASE = CaseResult(
    name="a", outcome=Outcome.FAIL, seconds=1.0, reason="r", diagnosis="d", error="e",
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
VERDICTS = dict(
    poisoned(
        Verdict(
            verdict=Outcome.FAIL,
            model={"name": "m"},
            levels={"chats": Level(verdict=Outcome.FAIL, reason="r\nsecond", compared=3)},
            notes=["n"],
        )
    )
)


@pytest.mark.parametrize("path", SESSIONS)
def test_no_text_of_a_session_does_anything(path: str, tmp_path: Path) -> None:
    assert len(SESSIONS) >= 10
    assert_harmless_html(write_page(SESSIONS[path], tmp_path).read_text())


@pytest.mark.parametrize("path", [path for path in VERDICTS if path != "model.name.KEY"])
def test_no_text_of_a_check_of_data_does_anything(path: str) -> None:
    stream = io.StringIO()
    print_data_verdict(VERDICTS[path], open_text_console(stream), Path("verdict.json"))
    assert_harmless_text(stream.getvalue())
