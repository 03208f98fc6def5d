"""Correct models in other frameworks and correct quantized folders: the comparison may fail none."""

import pytest

from assay.verdicts import Outcome
from packages.core.tests.foreign.captures import captures_with, judge_captures
from packages.core.tests.foreign.judged import CLEAN, Judged, judged_table
from packages.core.tests.foreign.quantized import folders_with, judge_folders
from packages.core.tests.trials.tables import publish


@pytest.fixture(scope="module")
def judged(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Judged]:
    wanted = request.config.getoption("--variant")
    captures = captures_with([CLEAN], wanted), tmp_path_factory.mktemp("captures")
    folders = folders_with([CLEAN], wanted), tmp_path_factory.mktemp("quantized")
    found = [*judge_captures(*captures), *judge_folders(*folders)]
    if not found:
        pytest.skip(f"no capture or folder is of {wanted!r}")
    reasons = "\n".join(f"- {one.name}: {_reasons(one)}" for one in found)
    table = judged_table(found)
    request.config.get_terminal_writer().line(f"\n{table}\n\n{reasons}")
    if request.config.getoption("--publish"):
        passed = sum(one.verdict.verdict is Outcome.PASS for one in found)
        failed = sum(one.verdict.verdict is Outcome.FAIL for one in found)
        totals = (
            f"Of {len(found)} correct captures and folders of other libraries {passed} pass,"
            f" {len(found) - passed - failed} are NOT_COMPARED and {failed} fail."
        )
        publish("foreign captures", totals, foreign_captures=table)
    return found


def _reasons(one: Judged) -> str:
    levels = one.verdict.levels.items()
    texts = [f"{name}: {level.reason}" for name, level in levels if level.reason]
    return "; ".join([one.verdict.headline or "", *texts])


def test_no_correct_capture_or_folder_fails(judged: list[Judged]) -> None:
    assert [one.name for one in judged if one.verdict.verdict is Outcome.FAIL] == []


def test_every_capture_compares_most_tensors(judged: list[Judged]) -> None:
    assert all(one.verdict.compared > 20 for one in judged)
