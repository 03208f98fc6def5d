import random
from pathlib import Path

import pytest

from assay.errors import UsageError
from assay.runs import SilentProgress
from assay_bench.performance.environments import Environment
from assay_bench.performance.records import NUM_WARMUP_ROUNDS, SuiteRequest
from assay_bench.performance.running import (
    NUM_QUADS,
    Block,
    Speed,
    SuiteComparison,
    compare_blocks,
    compare_environments,
    compare_suite,
    overall,
    turn_order,
)
from assay_bench.performance.suite_table import choose_suites
from packages.bench.tests.unit.performance.sample_results import suite_result


def blocks_of(pairs: list[tuple[float, float]]) -> list[Block]:
    return [
        Block(expected=[suite_result([a, 9.0])], actual=[suite_result([9.0, b])]) for a, b in pairs
    ]


def comparison(speed: Speed) -> SuiteComparison:
    return SuiteComparison(suite="prefill", speed=speed, ratio=1, lower=1, upper=1, block_ratios=[])


def test_ratio_of_a_block_uses_the_fastest_rounds() -> None:
    found = compare_suite("prefill", blocks_of([(1.0, 1.5), (2.0, 3.0)] * 3), margin=0.05)
    assert found.block_ratios == [1.5] * 6
    assert found.speed == "slower"


def test_contradicting_blocks_are_underpowered() -> None:
    pairs = [(1.0, 1.5), (1.5, 1.0)] * 3
    assert compare_suite("prefill", blocks_of(pairs), margin=0.05).speed == "UNDERPOWERED"


@pytest.mark.parametrize(
    ("speeds", "not_compared", "outcome", "code"),
    [
        (["not slower", "not slower"], {}, "PASS", 0),
        (["not slower", "slower", "UNDERPOWERED"], {}, "FAIL", 1),
        (["slower"], {"decode": "B"}, "FAIL", 1),
        (["not slower", "UNDERPOWERED"], {}, "UNDERPOWERED", 3),
        (["not slower"], {"decode": "B"}, "NOT_COMPARED", 3),
        ([], {}, "NOT_COMPARED", 3),
    ],
)
def test_pass_needs_every_suite_not_slower(
    speeds: list[Speed], not_compared: dict[str, str], outcome: str, code: int
) -> None:
    found = overall([comparison(speed) for speed in speeds], not_compared)
    assert (found, found.as_verdict.exit_code) == (outcome, code)


def test_suite_skipped_by_one_side_is_not_compared_and_by_both_is_ignored() -> None:
    reason = "needs 2 devices"
    blocks = [
        block.model_copy(update={"skipped": {"A": {"capture": reason}, "B": skipped_by_b}})
        for block in blocks_of([(1.0, 1.0)] * 6)
        for skipped_by_b in [{"capture": reason, "decode": reason}]
    ]
    suites = choose_suites(["prefill", "decode", "capture"])
    compared, not_compared, skipped = compare_blocks(blocks, suites, 0.05)
    assert not_compared == {"decode": f"only one side could run it; B: {reason}"}
    assert skipped == {"capture": f"A: {reason}; B: {reason}"}
    assert [suite.suite for suite in compared] == ["prefill"]
    assert overall(compared, not_compared) == "NOT_COMPARED"


def test_too_few_blocks_are_refused_before_anything_is_run(tmp_path: Path) -> None:
    here = Environment.current()
    with pytest.raises(UsageError, match="5 blocks are too few"):
        compare_environments(
            (here, here),
            SuiteRequest(suites=choose_suites([])),
            margin=0.05,
            num_blocks=5,
            folder=tmp_path,
            progress=SilentProgress(),
        )
    assert list(tmp_path.iterdir()) == []


def test_turns_begin_with_a_warm_up_and_are_balanced() -> None:
    turns = list(turn_order(random.Random(0)))  # noqa: S311 - reproducible
    warm_up, rest = turns[: 2 * NUM_WARMUP_ROUNDS], turns[2 * NUM_WARMUP_ROUNDS :]
    quads = {"".join(rest[n : n + 4]) for n in range(0, len(rest), 4)}
    assert warm_up == ["A", "B"] * NUM_WARMUP_ROUNDS
    assert quads == {"ABBA", "BAAB"}
    assert len(rest) == 4 * NUM_QUADS


def test_each_side_waits_once_more_than_its_turns() -> None:
    turns = list(turn_order(random.Random(1)))  # noqa: S311 - reproducible
    asked = SuiteRequest(num_rounds=2 * NUM_QUADS)
    assert turns.count("A") == turns.count("B") == asked.num_turns - 1
