"""Which suites of a history are slower than they were."""

from collections.abc import Sequence
from typing import Literal

from pydantic import ConfigDict, Field

from assay.verdicts import SCHEMA, Outcome, Record
from assay_bench.performance.history.change_points import (
    FEWEST_RUNS,
    ChangePoint,
    find_change_points,
)
from assay_bench.performance.history.series import Series

# Older runs say little of today: machines of the same kind are exchanged, and what changed long ago has
# been seen.
NUM_RUNS_CHECKED = 60


class FoundChange(Record):
    """A change of level.

    date, software: of the first run after it. before, after: median ratios to the control.
    p: the probability of so clear a change if all runs were alike.
    """

    date: str
    software: str
    before: float
    after: float
    p: float
    direction: Literal["slower", "faster"]


class SeriesCheck(Record):
    """One suite on one kind of machine.

    num_runs: that were looked at, the last ones. changes: of level among these, in their order.
    standing: numbers of those that made it slower and that no later run has made up for by half.
    """

    machine: str
    run: str
    model: str
    suite: str
    verdict: Outcome
    reason: str
    num_runs: int
    changes: list[FoundChange] = Field(default_factory=list)
    standing: list[int] = Field(default_factory=list)


class HistoryCheck(Record):
    """What `assay bench history check --json` prints."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_: int = Field(default=SCHEMA, alias="schema")
    verdict: Outcome
    series: list[SeriesCheck]

    def to_json(self) -> str:
        """Indented."""
        return self.model_dump_json(by_alias=True, indent=1)


def check_history(all_series: Sequence[Series]) -> HistoryCheck:
    """FAIL if any series has a slow-down that still stands; NOT_COMPARED if none is long enough.

    Raises: MachineError where ruptures is not installed.
    """
    checks = [check_series(series) for series in all_series]
    verdicts = {check.verdict for check in checks}
    if Outcome.FAIL in verdicts:
        verdict = Outcome.FAIL
    else:
        verdict = Outcome.PASS if Outcome.PASS in verdicts else Outcome.NOT_COMPARED
    return HistoryCheck(verdict=verdict, series=checks)


def check_series(series: Series) -> SeriesCheck:
    """The changes in the last runs of one series, and whether one of them is to be looked at."""
    points = series.points[-NUM_RUNS_CHECKED:]
    changes = find_change_points([point.ratio for point in points])
    standing = [n for n, change in enumerate(changes) if _stands(change, changes[-1].after)]
    if len(points) < 2 * FEWEST_RUNS:
        verdict = Outcome.NOT_COMPARED
        reason = f"{len(points)} runs; a change can be told from {2 * FEWEST_RUNS} on"
    elif standing:
        change = changes[standing[-1]]
        point = points[change.index]
        verdict = Outcome.FAIL
        reason = (
            f"takes {change.factor:.3f} times as long since {point.date} ({point.software}):"
            f" {change.before:.4g} -> {change.after:.4g} times its control, p = {change.p:.2g}"
        )
    else:
        verdict, reason = Outcome.PASS, f"no slow-down stands in {len(points)} runs"
    return SeriesCheck(
        machine=series.key.machine,
        run=series.key.run,
        model=series.key.model,
        suite=series.key.suite,
        verdict=verdict,
        reason=reason,
        num_runs=len(points),
        changes=[
            FoundChange(
                date=points[change.index].date,
                software=points[change.index].software,
                before=change.before,
                after=change.after,
                p=change.p,
                direction="slower" if change.factor > 1 else "faster",
            )
            for change in changes
        ],
        standing=standing,
    )


def _stands(change: ChangePoint, latest: float) -> bool:
    """Whether more than half of a slow-down is left at the level of the latest runs."""
    return change.factor > 1 and latest > (change.before + change.after) / 2
