"""Intervals computed by hand. n blocks have n (n + 1) / 2 averages of two, including each block with itself."""

import math
import random

import pytest

from assay.errors import UsageError
from assay_bench.performance.running import judge_speed, ratio_interval


def test_six_blocks_span_the_interval() -> None:
    # P(W+ = 0) = 1/64 < 0.025 <= P(W+ <= 1) = 2/64: no average is excluded.
    ratios = [1.01, 1.02, 1.04, 1.05, 1.08, 1.16]
    _, lower, upper = ratio_interval(ratios)
    assert lower == pytest.approx(1.01)
    assert upper == pytest.approx(1.16)


def test_eight_blocks_exclude_three_averages_at_each_end() -> None:
    # The tabulated critical value for n = 8 at a two-sided 0.05 is 3: P(W+ <= 3) = 5/256 = 0.0195,
    # P(W+ <= 4) = 7/256. Logs 0, 1, 2, 4, 8, ...: the averages begin 0, 0.5, 1, 1, 1.5.
    logs = [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]
    _, lower, upper = ratio_interval([math.exp(value / 100) for value in logs])
    assert lower == pytest.approx(math.exp(0.01))
    # From the top: 64, 48, 40, 36.
    assert upper == pytest.approx(math.exp(0.36))


def test_swapped_sides_invert_the_interval() -> None:
    ratios = [1.02, 0.98, 1.11, 1.07, 1.01, 1.05, 0.99]
    ratio, lower, upper = ratio_interval(ratios)
    inverse = ratio_interval([1 / ratio for ratio in ratios])
    assert inverse == pytest.approx((1 / ratio, 1 / upper, 1 / lower))


def test_equal_blocks_have_an_interval_of_width_zero() -> None:
    assert ratio_interval([1.25] * 6) == pytest.approx((1.25, 1.25, 1.25))


def test_five_blocks_are_too_few() -> None:
    with pytest.raises(
        UsageError, match="5 blocks are too few for an interval of 95% confidence; at"
    ):
        ratio_interval([1.0] * 5)


@pytest.mark.parametrize(
    ("interval", "speed"),
    [
        ((1.06, 1.10), "slower"),
        ((1.04, 1.06), "UNDERPOWERED"),
        ((0.98, 1.20), "UNDERPOWERED"),
        ((1.05, 1.20), "UNDERPOWERED"),
        ((0.90, 1.05), "UNDERPOWERED"),
        ((1.01, 1.04), "not slower"),
        ((0.50, 0.60), "not slower"),
    ],
)
def test_interval_must_be_on_one_side_of_the_margin(
    interval: tuple[float, float], speed: str
) -> None:
    assert judge_speed(*interval, 0.05) == speed


def test_interval_has_its_nominal_coverage() -> None:
    rng = random.Random(0)  # noqa: S311 - reproducible
    covered = 0
    for _ in range(200):
        blocks = [1.1 * math.exp(0.03 * rng.gauss(0, 1)) for _ in range(10)]
        _, lower, upper = ratio_interval(blocks)
        covered += lower <= 1.1 <= upper
    # Exactly 1 - 2 * 25/1024 = 95.1 %: of 200 between 91 % and 98.5 % with probability 0.99.
    assert 0.91 <= covered / 200 <= 0.985
