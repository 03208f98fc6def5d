"""What a comparison of two environments writes: every sample, the intervals and the verdict."""

from collections.abc import Sequence
from typing import Any

from pydantic import ConfigDict, Field

from assay.verdicts import SCHEMA, Record
from assay_bench.outcomes import PairedOutcome
from assay_bench.performance.paired.judging import Speed, ratio_interval
from assay_bench.performance.results import SuiteResult

COMPARISON_FILE = "ab.json"


class Block(Record):
    """One process of each environment, measured in turns.

    expected, actual: the suites of A and of B. skipped: by environment, "A" or "B", and suite.
    """

    expected: list[SuiteResult]
    actual: list[SuiteResult]
    skipped: dict[str, dict[str, str]] = Field(default_factory=dict)


class SuiteComparison(Record):
    """How many times as long B takes for one suite as A.

    lower, upper: ends of its interval of 95 % confidence. block_ratios: in each block the
    fastest round of B over that of A.
    """

    suite: str
    speed: Speed
    ratio: float
    lower: float
    upper: float
    block_ratios: list[float]


class EnvironmentComparison(Record):
    """ab.json.

    margin: by how much B may be slower, as a share. not_compared: for each suite that only one side
        could run, why. skipped: for each that neither could.
    environments: of A and B the name and the versions. seed: of the order of turns.
    """

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_: int = Field(default=SCHEMA, alias="schema")
    verdict: PairedOutcome
    margin: float
    suites: list[SuiteComparison]
    not_compared: dict[str, str] = Field(default_factory=dict)
    skipped: dict[str, str] = Field(default_factory=dict)
    environments: dict[str, dict[str, Any]] = Field(default_factory=dict)
    run: str
    model: str
    seed: int
    blocks: list[Block]
    provenance: dict[str, Any] = Field(default_factory=dict)

    def to_json(self) -> str:
        """The text of ab.json."""
        return self.model_dump_json(by_alias=True, indent=1) + "\n"


def compare_suite(suite: str, blocks: Sequence[Block], margin: float) -> SuiteComparison:
    """The interval and the verdict of one suite that both sides of all blocks have."""
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
    """FAIL if any suite is slower; PASS only if all are known not to be."""
    speeds = {suite.speed for suite in suites}
    if "slower" in speeds:
        return PairedOutcome.FAIL
    if not_compared or not suites:
        return PairedOutcome.NOT_COMPARED
    return PairedOutcome.UNDERPOWERED if "UNDERPOWERED" in speeds else PairedOutcome.PASS
