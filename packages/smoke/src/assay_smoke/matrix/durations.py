"""Durations and outcomes of cases by kind of machine: recorded ones, and estimates.

One JSON file holds the last runs of every case. It is a cache: without it, plans use estimates.
"""

import os
import platform
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Annotated

from pydantic import Field

from assay.files import DiskError, UnreadableFileError, read_record, write_whole
from assay.runs.folders import cache_folder, locked
from assay.verdicts import SCHEMA, Outcome, Record
from assay_smoke.matrix.cases import FEATURES, Case, CaseIdError, case_of
from assay_smoke.matrix.rules import HOST

# Enough runs for a median that one slow run does not move.
RUNS_KEPT = 5

# Rough times on two CPU cores, until a run is recorded. Starting ranks and reading checkpoints take
# most of it.
_START_SECONDS = 5.0
_SECONDS_A_RANK = 1.0


class RecordedRun(Record):
    """A past run of a case."""

    seconds: float = Field(ge=0, allow_inf_nan=False)
    outcome: Outcome
    time: datetime


class History(Record):
    """The last runs of every case, the newest last, by kind of machine and case id."""

    schema_: int = Field(default=SCHEMA, alias="schema")
    machines: dict[str, dict[str, Annotated[list[RecordedRun], Field(min_length=1)]]] = Field(
        default_factory=dict
    )
    problem: str | None = Field(default=None, exclude=True)
    """Why the file could not be read. Not written."""


@dataclass(frozen=True, slots=True)
class Durations:
    """Expected times of cases on one kind of machine."""

    history: History
    machine: str
    slowness: float = 1.0
    """Median of recorded time over estimated time."""

    @classmethod
    def of(cls, history: History, machine: str) -> "Durations":
        """Read the runs on `machine` from `history`."""
        ratios = []
        for case_id, runs in history.machines.get(machine, {}).items():
            with suppress(CaseIdError):  # recorded by a version with other words
                ratios.append(_typical_seconds(runs) / estimated_seconds(case_of(case_id)))
        return cls(history, machine, median(ratios) if ratios else 1.0)

    def runs_of(self, case: Case) -> list[RecordedRun]:
        """Return the last runs of `case` on this kind of machine, the newest last."""
        return self.history.machines.get(self.machine, {}).get(case.id, [])

    def num_failures(self, case: Case) -> int:
        """Count the recorded runs of `case` that did not pass."""
        return sum(run.outcome is not Outcome.PASS for run in self.runs_of(case))

    def expected_seconds(self, case: Case) -> float:
        """Return the recorded time of `case`, or its estimate scaled by the slowness of the machine."""
        runs = self.runs_of(case)
        return _typical_seconds(runs) if runs else estimated_seconds(case) * self.slowness


def estimated_seconds(case: Case) -> float:
    """Estimate the time of a case from its framework, cards and features."""
    ranks = case.cards if case.framework != "one-process" else 0
    extra = sum(FEATURES[name].extra_seconds for name in case.features)
    return _START_SECONDS + _SECONDS_A_RANK * ranks + extra


def machine_kind(vendor: str) -> str:
    """Return the kind of machine for which durations are recorded: of a host, its architecture and cores."""
    if vendor != HOST:
        return vendor
    return f"{vendor}-{platform.machine() or 'unknown'}-{os.cpu_count() or 1}"


def history_file() -> Path:
    """Return the file with this user's recorded runs."""
    return cache_folder() / "smoke-history.json"


def read_history(path: Path) -> History:
    """Read a history. A file that cannot be read gives a history with a `problem`."""
    if not path.exists():
        return History(schema=SCHEMA)
    try:
        return read_record(History, path)
    except UnreadableFileError as error:
        return History(schema=SCHEMA, problem=f"not used: {error}")


def record_runs(path: Path, machine: str, runs: Iterable[tuple[Case, RecordedRun]]) -> None:
    """Append runs to the history in `path`, which other processes may update.

    Raises: DiskError if it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock")):
            history = read_history(path)
            of_machine = history.machines.setdefault(machine, {})
            for case, run in runs:
                of_machine[case.id] = [*of_machine.get(case.id, ()), run][-RUNS_KEPT:]
            write_whole(path, history.model_dump_json(by_alias=True) + "\n")
    except OSError as error:
        raise DiskError.refused(path, error) from error


def _typical_seconds(runs: Sequence[RecordedRun]) -> float:
    """Return the median of passed runs. If none passed, return the longest: a hang may repeat."""
    passed = [run.seconds for run in runs if run.outcome is Outcome.PASS]
    return median(passed) if passed else max(run.seconds for run in runs)
