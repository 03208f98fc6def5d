"""The file ab.json: if one environment is slower than another, from the ratios of blocks."""

import math
from collections.abc import Sequence
from statistics import median
from typing import Any, Literal

import numpy as np
from pydantic import ConfigDict, Field

from assay.errors import UsageError
from assay.verdicts import SCHEMA, Record
from assay_bench.comparing.terms import PairedOutcome
from assay_bench.performance.records import SuiteResult

Speed = Literal["slower", "not slower", "UNDERPOWERED"]

# Confidence of the interval for any symmetric distribution of the log ratios.
CONFIDENCE = 0.95

# With five blocks, the widest interval has a confidence of 1 - 2 / 2**5 = 93.75 %.
MIN_BLOCKS = 6

COMPARISON_FILE = "ab.json"


def require_blocks(num_blocks: int) -> None:
    """Raise UsageError if there are too few blocks for an interval."""
    if num_blocks < MIN_BLOCKS:
        raise UsageError(
            f"{num_blocks} blocks are too few for an interval of {CONFIDENCE:.0%} confidence; at least"
            f" {MIN_BLOCKS} are needed"
        )


def ratio_interval(block_ratios: Sequence[float]) -> tuple[float, float, float]:
    """Compute the Hodges-Lehmann estimate of the blocks' common ratio, and its exact interval.

    block_ratios: one positive ratio per block. Blocks are independent because they are different
        processes; the rounds inside of a block are not.
    Returns: the estimate, and the lower and upper end of an interval of at least 95 % confidence.
    Raises: UsageError.
    Source: Hollander, Wolfe & Chicken, Nonparametric Statistical Methods, 3.2-3.3 (intervals from the
        signed-rank test).
    """
    require_blocks(len(block_ratios))
    logs = [math.log(ratio) for ratio in block_ratios]
    averages = sorted((one + other) / 2 for n, one in enumerate(logs) for other in logs[n:])
    # The statistic is a sum of ranks, each with probability 1/2. It counts the averages on one side of a center.
    chances = np.ones(1)
    for rank in range(1, len(logs) + 1):
        chances = np.convolve(chances, [0.5, *[0.0] * (rank - 1), 0.5])
    num_excluded = int(np.searchsorted(np.cumsum(chances), (1 - CONFIDENCE) / 2, side="right"))
    ends = median(averages), averages[num_excluded - 1], averages[-num_excluded]
    ratio, lower, upper = map(math.exp, ends)
    return ratio, lower, upper


def judge_speed(lower: float, upper: float, margin: float) -> Speed:
    """Judge if B is slower by more than `margin`, a share: 0.05 for 5 %.

    lower, upper: interval of the time of B relative to A.
    Returns: UNDERPOWERED if the interval contains 1 + margin, so that more blocks are needed.
    """
    if lower > 1 + margin:
        return "slower"
    return "not slower" if upper < 1 + margin else "UNDERPOWERED"


class Block(Record):
    """One process of each environment, which took turns."""

    expected: list[SuiteResult]
    """Suites of A."""
    actual: list[SuiteResult]
    """Suites of B."""
    skipped: dict[str, dict[str, str]] = Field(default_factory=dict)
    """Reasons by environment, "A" or "B", and suite."""


class SuiteComparison(Record):
    """The time of B relative to A in one suite."""

    suite: str
    speed: Speed
    ratio: float
    lower: float
    """Lower end of the interval of 95 % confidence."""
    upper: float
    block_ratios: list[float]
    """Fastest round of B over the fastest round of A in each block."""


class EnvironmentComparison(Record):
    """The content of ab.json."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_: int = Field(default=SCHEMA, alias="schema")
    verdict: PairedOutcome
    margin: float
    """Largest acceptable slow-down of B, as a share."""
    suites: list[SuiteComparison]
    not_compared: dict[str, str] = Field(default_factory=dict)
    """Reasons of suites that only one side could run."""
    skipped: dict[str, str] = Field(default_factory=dict)
    """Reasons of suites that neither side could run."""
    environments: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Name and versions of A and B."""
    run: str
    model: str
    seed: int
    """Seed of the order of turns."""
    blocks: list[Block]
    provenance: dict[str, Any] = Field(default_factory=dict)

    def to_json(self) -> str:
        """Format the text of ab.json."""
        return self.model_dump_json(by_alias=True, indent=1) + "\n"


def compare_suite(suite: str, blocks: Sequence[Block], margin: float) -> SuiteComparison:
    """Compare one suite that both sides ran in all blocks."""
    ratios = []
    for block in blocks:
        (expected,) = (one for one in block.expected if one.suite == suite)
        (actual,) = (one for one in block.actual if one.suite == suite)
        ratios.append(actual.fastest / expected.fastest)
    ratio, lower, upper = ratio_interval(ratios)
    speed = judge_speed(lower, upper, margin)
    return SuiteComparison(
        suite=suite, speed=speed, ratio=ratio, lower=lower, upper=upper, block_ratios=ratios
    )


def overall(suites: Sequence[SuiteComparison], not_compared: dict[str, str]) -> PairedOutcome:
    """Return FAIL if any suite is slower, and PASS only if every suite is not slower."""
    speeds = {suite.speed for suite in suites}
    if "slower" in speeds:
        return PairedOutcome.FAIL
    if not_compared or not suites:
        return PairedOutcome.NOT_COMPARED
    return PairedOutcome.UNDERPOWERED if "UNDERPOWERED" in speeds else PairedOutcome.PASS
