"""The judged statistics of a check, read from its measurements."""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.stages import Stage


@dataclass(frozen=True)
class Reading:
    """One statistic at one place; `actual` is the candidate's error, `limit` that of `ratio`."""

    statistic: str
    stage: Stage
    port: str
    actual: float
    ratio: float
    limit: float

    @property
    def severity(self) -> float:
        """How many times over its limit; a NaN is infinitely often."""
        if math.isnan(self.ratio):
            return math.inf
        if self.limit == 0:
            return math.inf if self.ratio > 0 else 0.0
        return self.ratio / self.limit


def read_readings(measurements: Path) -> list[Reading]:
    """What was judged; rows of single tokens are only shown."""
    rows: list[dict[str, Any]] = [
        json.loads(line)
        for line in measurements.read_text(encoding="utf-8").splitlines()
        if '"prompt":null' in line
    ]
    return [
        Reading(
            row["statistic"],
            Stage(row["module"], row["phase"]),
            row["port"],
            *(float(row[name]) for name in ("actual", "ratio", "limit")),
        )
        for row in rows
        if row["limit"] is not None
    ]


def worst_readings(readings: Iterable[Reading]) -> dict[str, Reading]:
    """For each statistic the reading nearest to its limit."""
    worst: dict[str, Reading] = {}
    for reading in readings:
        known = worst.get(reading.statistic)
        if known is None or reading.severity > known.severity:
            worst[reading.statistic] = reading
    return worst


def fingerprint(readings: Sequence[Reading]) -> str:
    """The same for two candidates of one golden only if all their errors are the same numbers."""
    errors = [(one.stage.module, one.port, one.statistic, one.actual) for one in readings]
    return hashlib.sha256(repr(errors).encode()).hexdigest()
