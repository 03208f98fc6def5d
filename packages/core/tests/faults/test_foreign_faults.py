"""Wrong weights in other frameworks and in quantized folders: the comparison has to name each."""

import pytest

from packages.core.tests.foreign.captures import FAULTS, captures_with, judge_captures
from packages.core.tests.foreign.judged import Judged, judged_table
from packages.core.tests.foreign.quantized import PLANTS, folders_with, judge_folders
from packages.core.tests.trials.tables import publish


@pytest.fixture(scope="module")
def judged(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Judged]:
    captures = judge_captures(captures_with(FAULTS), tmp_path_factory.mktemp("captures"))
    folders = judge_folders(folders_with(PLANTS), tmp_path_factory.mktemp("quantized"))
    found = [*captures, *folders]
    table = judged_table(found)
    request.config.get_terminal_writer().line(f"\n{table}")
    if request.config.getoption("--publish"):
        located = sum(one.is_located for one in found)
        totals = f"Of {len(found)} wrong weights {located} are named."
        publish("foreign faults", totals, foreign_faults=table)
    return found


def test_every_wrong_weight_is_named(judged: list[Judged]) -> None:
    assert len(judged) == 40 + 5 * 19
    assert [one.name for one in judged if not one.is_located] == []
