"""Pairs of dumps of correct runs: the comparison of files may fail none."""

import pytest

from assay.verdicts import Outcome
from packages.core.tests.false_alarms.offline_pairs import (
    Judged,
    all_pairs,
    describe_all,
    judge_all,
    pairs_table,
    pairs_totals,
)
from packages.core.tests.trials.tables import publish

FEWEST_PAIRS = 200


@pytest.fixture(scope="module")
def judged(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Judged]:
    wanted, part = map(request.config.getoption, ("--variant", "--part"))
    found = judge_all(wanted, part, tmp_path_factory.mktemp("pairs"))
    if not found:
        pytest.skip(f"no pair of dumps is of {wanted!r}")
    reasons = "\n".join(f"- {text}" for text in describe_all(found, Outcome.NOT_COMPARED))
    text = f"{pairs_table(found)}\n\n{reasons}".strip()
    request.config.get_terminal_writer().line(f"\n{text}")
    if request.config.getoption("--publish"):
        publish("offline pairs", pairs_totals(found), offline_pairs=pairs_table(found))
    return found


def test_there_are_enough_pairs() -> None:
    names = [pair.name for pair in all_pairs()]
    assert len(set(names)) == len(names) >= FEWEST_PAIRS


def test_no_correct_pair_fails(judged: list[Judged]) -> None:
    assert not describe_all(judged, Outcome.FAIL)


def test_nearly_all_correct_pairs_pass(judged: list[Judged]) -> None:
    others = describe_all(judged, Outcome.NOT_COMPARED)
    assert len(others) <= 0.05 * len(judged), others
