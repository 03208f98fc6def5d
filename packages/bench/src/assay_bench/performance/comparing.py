"""The file ab.json: if one environment is slower than another, from the ratios of blocks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Literal

from pydantic import ConfigDict, Field

from assay.errors import UsageError
from assay.verdicts import SCHEMA, Record
from assay_bench.outcomes import PairedOutcome
from assay_bench.performance.results import SuiteResult

Speed = Literal["slower", "not slower", "UNDERPOWERED"]

# Confidence of the interval for any symmetric distribution of the log ratios.
CONFIDENCE = 0.95

# With five blocks, the widest interval has a confidence of 1 - 2 / 2**5 = 93.75 %.
MIN_BLOCKS = 6

COMPARISON_FILE = "ab.json"


@dataclass(frozen=True, slots=True)
class RatioInterval:
    """The time of B relative to A, with an interval of at least 95 % confidence."""

    ratio: float
    lower: float
    upper: float

    def judge(self, margin: float) -> Speed:
        """Judge if B is slower by more than `margin`, a share: 0.05 for 5 %.

        Returns: UNDERPOWERED if the interval contains 1 + margin, so that more blocks are needed.
        """
        if self.lower > 1 + margin:
            return "slower"
        return "not slower" if self.upper < 1 + margin else "UNDERPOWERED"


def require_blocks(num_blocks: int) -> None:
    """Raise UsageError if there are too few blocks for an interval."""
    if num_blocks < MIN_BLOCKS:
        raise UsageError(
            f"{num_blocks} blocks are too few for an interval of {CONFIDENCE:.0%} confidence; at least"
            f" {MIN_BLOCKS} are needed"
        )


def ratio_interval(block_ratios: Sequence[float]) -> RatioInterval:
    """Compute the Hodges-Lehmann estimate of the blocks' common ratio, and its exact interval.

    block_ratios: one positive ratio per block. Blocks are independent because they are different
        processes; the rounds inside of a block are not.
    Raises: UsageError.
    Source: Hollander, Wolfe & Chicken, Nonparametric Statistical Methods, 3.2-3.3 (intervals from the
        signed-rank test).
    """
    require_blocks(len(block_ratios))
    logs = [math.log(ratio) for ratio in block_ratios]
    return RatioInterval(
        ratio=math.exp(median(_walsh_averages(logs))),
        lower=math.exp(_lower_end(logs)),
        upper=math.exp(-_lower_end([-value for value in logs])),
    )


def _walsh_averages(values: Sequence[float]) -> list[float]:
    return sorted((one + other) / 2 for n, one in enumerate(values) for other in values[n:])


def _lower_end(values: Sequence[float]) -> float:
    """Return the smallest center of symmetry that the signed-rank test does not reject as too small."""
    from scipy.stats import wilcoxon

    averages = _walsh_averages(values)
    for below, above in pairwise(averages):
        center = (below + above) / 2
        if not below < center < above:
            continue  # equal averages have no center between them
        differences = [value - center for value in values]
        p = wilcoxon(differences, alternative="greater", method="exact").pvalue
        if p > (1 - CONFIDENCE) / 2:
            return below
    return averages[0]


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
    found = ratio_interval(ratios)
    return SuiteComparison(
        suite=suite,
        speed=found.judge(margin),
        ratio=found.ratio,
        lower=found.lower,
        upper=found.upper,
        block_ratios=ratios,
    )


def overall(suites: Sequence[SuiteComparison], not_compared: dict[str, str]) -> PairedOutcome:
    """Return FAIL if any suite is slower, and PASS only if every suite is not slower."""
    speeds = {suite.speed for suite in suites}
    if "slower" in speeds:
        return PairedOutcome.FAIL
    if not_compared or not suites:
        return PairedOutcome.NOT_COMPARED
    return PairedOutcome.UNDERPOWERED if "UNDERPOWERED" in speeds else PairedOutcome.PASS
