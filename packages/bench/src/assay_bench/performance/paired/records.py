"""The file ab.json: samples, intervals and verdict."""

from collections.abc import Sequence
from typing import Any

from pydantic import ConfigDict, Field

from assay.verdicts import SCHEMA, Record
from assay_bench.outcomes import PairedOutcome
from assay_bench.performance.paired.judging import Speed, ratio_interval
from assay_bench.performance.results import SuiteResult

COMPARISON_FILE = "ab.json"


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
