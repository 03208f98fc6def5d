"""Wrong weights in other frameworks: the comparison with transformers has to name each."""

import pytest

from packages.core.tests.foreign.captures import (
    FAULTS,
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
    found = judge_all(captures_with(FAULTS), tmp_path_factory.mktemp("captures"))
    table = captures_table(found)
    request.config.get_terminal_writer().line(f"\n{table}")
    if request.config.getoption("--publish"):
        located = sum(one.located for one in found)
        totals = f"Of {len(found)} wrong weights {located} are named."
        publish("foreign faults", totals, foreign_faults=table)
    return found


def test_every_wrong_weight_is_named(judged: list[Judged]) -> None:
    assert len(judged) == 40
    assert [one.capture.name for one in judged if not one.located] == []
