"""The line of a result on standard error."""

import pytest

from assay.verdicts import Outcome
from assay_smoke.commands.run import _tell
from assay_smoke.session.results import CaseResult


def test_a_result_is_one_line_whose_color_is_not_escaped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = "a" * 100
    _tell(CaseResult(name=f"{name}\x1b[31m", outcome=Outcome.PASS, seconds=1.0), 1, 2)

    assert capsys.readouterr().err == f"[1/2] PASS {name}\\u001b[31m (1.0 s)\n"
