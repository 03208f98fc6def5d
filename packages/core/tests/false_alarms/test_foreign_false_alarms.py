"""Correct models in other frameworks: the comparison with transformers may fail none."""

import pytest

from assay.verdicts import Outcome
from packages.core.tests.foreign.captures import (
    CLEAN,
    Judged,
    captures_table,
    captures_with,
    judge_all,
)
from packages.core.tests.trials.tables import publish


@pytest.fixture(scope="module")
def judged(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Judged]:
    wanted = request.config.getoption("--variant")
    found = judge_all(captures_with([CLEAN], wanted), tmp_path_factory.mktemp("captures"))
    if not found:
        pytest.skip(f"no capture is of {wanted!r}")
    reasons = "\n".join(f"- {one.capture.name}: {_reasons(one)}" for one in found)
    table = captures_table(found)
    request.config.get_terminal_writer().line(f"\n{table}\n\n{reasons}")
    if request.config.getoption("--publish"):
        passed = sum(one.verdict.verdict is Outcome.PASS for one in found)
        failed = sum(one.verdict.verdict is Outcome.FAIL for one in found)
        totals = (
            f"Of {len(found)} correct captures of other frameworks {passed} pass,"
            f" {len(found) - passed - failed} are NOT_COMPARED and {failed} fail."
        )
        publish("foreign captures", totals, foreign_captures=table)
    return found


def _reasons(one: Judged) -> str:
    levels = one.verdict.levels.items()
    texts = [f"{name}: {level.reason}" for name, level in levels if level.reason]
    return "; ".join([one.verdict.headline or "", *texts])


def test_no_correct_capture_fails(judged: list[Judged]) -> None:
    assert [one.capture.name for one in judged if one.verdict.verdict is Outcome.FAIL] == []


def test_every_capture_compares_most_tensors(judged: list[Judged]) -> None:
    assert all(one.verdict.compared > 20 for one in judged)
