import pytest

from assay.verdicts import Outcome
from assay_bench.performance.history.checking import (
    NUM_RUNS_CHECKED,
    check_history,
    check_series,
)
from assay_bench.performance.history.series import Point, Series, SeriesKey

pytest.importorskip("ruptures", reason="it has no release for this Python")

STEADY = [1.0 + 0.001 * ((7 * n) % 20 - 10) for n in range(20)]


def series(*levels: float, suite: str = "decode") -> Series:
    """Twenty runs at each level."""
    ratios = [level * ratio for level in levels for ratio in STEADY]
    points = tuple(Point(f"day {n}", ratio, "torch 2") for n, ratio in enumerate(ratios))
    return Series(SeriesKey("a machine", "cpu/float32", "micro:llama", suite), points)


def test_a_slow_down_that_stands_fails_with_its_first_run() -> None:
    found = check_series(series(1.0, 1.1))
    assert found.verdict is Outcome.FAIL
    assert found.reason == (
        "takes 1.100 times as long since day 20 (torch 2): 0.9995 -> 1.099 times its control,"
        " p = 0.0001"
    )
    assert [(change.direction, change.date) for change in found.changes] == [("slower", "day 20")]


@pytest.mark.parametrize(
    ("levels", "outcome"),
    [
        ((1.0,), Outcome.PASS),
        ((1.0, 0.9), Outcome.PASS),
        ((1.0, 1.1, 1.0), Outcome.PASS),
        ((1.0, 1.2, 1.06), Outcome.PASS),
        ((1.0, 1.2, 1.14), Outcome.FAIL),
        ((1.0, 0.9, 1.0), Outcome.FAIL),
    ],
)
def test_a_slow_down_stands_until_more_than_half_is_made_up_for(
    levels: tuple[float, ...], outcome: Outcome
) -> None:
    assert check_series(series(*levels)).verdict is outcome


def test_what_lies_further_back_is_not_looked_at() -> None:
    found = check_series(series(0.5, 1.0, 1.0, 1.0))
    assert (found.verdict, found.num_runs) == (Outcome.PASS, NUM_RUNS_CHECKED)


def test_a_short_series_is_not_compared() -> None:
    short = Series(series(1.0).key, series(1.0).points[:7])
    found = check_series(short)
    assert (found.verdict, found.reason) == (
        Outcome.NOT_COMPARED,
        "7 runs; a change can be told from 8 on",
    )


def test_one_series_that_fails_fails_the_history() -> None:
    short = Series(series(1.0).key, series(1.0).points[:7])
    assert check_history([series(1.0), short]).verdict is Outcome.PASS
    assert check_history([series(1.0), series(1.0, 1.1), short]).verdict is Outcome.FAIL
    assert check_history([short]).verdict is Outcome.NOT_COMPARED
    assert check_history([]).verdict is Outcome.NOT_COMPARED
