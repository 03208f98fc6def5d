"""How long each case took, and how it ended, on each kind of machine: recorded, and estimated.

One JSON file holds the last runs of every case. It is a cache: without it a plan is made from
estimates, and nothing else changes.
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
from assay.runs.caches import cache_folder, locked
from assay.verdicts import SCHEMA, Outcome, Record
from assay_smoke.matrix.cases import Case, CaseIdError, case_of
from assay_smoke.matrix.vendors import HOST

# Runs of a case that are kept: enough for a median that one slow run does not move.
RUNS_KEPT = 5

# Seconds of a case until one is recorded, on two cores of a host: the largest part is starting the
# ranks and reading what was saved. Rough on purpose; the first recorded runs replace them.
_START_SECONDS = 5.0
_SECONDS_A_RANK = 1.0
_COMPILE_SECONDS = 10.0


class RecordedRun(Record):
    """One run of a case."""

    seconds: float = Field(ge=0, allow_inf_nan=False)
    outcome: Outcome
    time: datetime


class History(Record):
    """The last runs of every case, the newest last, by kind of machine and id of the case.

    problem: why nothing could be read, where a file is there; it is not written.
    """

    schema_: int = Field(default=SCHEMA, alias="schema")
    machines: dict[str, dict[str, Annotated[list[RecordedRun], Field(min_length=1)]]] = Field(
        default_factory=dict
    )
    problem: str | None = Field(default=None, exclude=True)

    def runs_of(self, case: Case, machine: str) -> list[RecordedRun]:
        """The last runs of `case` on such a machine, the newest last."""
        return self.machines.get(machine, {}).get(case.id, [])


@dataclass(frozen=True, slots=True)
class Durations:
    """What is known of the time that cases take on one kind of machine.

    slowness: how many times their estimates the recorded cases took, at the median.
    """

    history: History
    machine: str
    slowness: float = 1.0

    @classmethod
    def of(cls, history: History, machine: str) -> "Durations":
        """From what `history` has of `machine`, a kind of machine."""
        ratios = []
        for case_id, runs in history.machines.get(machine, {}).items():
            with suppress(CaseIdError):  # of a version with other words
                ratios.append(_typical_seconds(runs) / estimated_seconds(case_of(case_id)))
        return cls(history, machine, median(ratios) if ratios else 1.0)

    def is_recorded(self, case: Case) -> bool:
        """Whether `case` has run on such a machine."""
        return bool(self.history.runs_of(case, self.machine))

    def num_runs(self, case: Case) -> int:
        """How many of its last runs are known."""
        return len(self.history.runs_of(case, self.machine))

    def num_failures(self, case: Case) -> int:
        """How many of its last runs did not pass."""
        runs = self.history.runs_of(case, self.machine)
        return sum(run.outcome is not Outcome.PASS for run in runs)

    def expected_seconds(self, case: Case) -> float:
        """What recorded runs took, else the estimate times the slowness of this machine."""
        runs = self.history.runs_of(case, self.machine)
        return _typical_seconds(runs) if runs else estimated_seconds(case) * self.slowness


def estimated_seconds(case: Case) -> float:
    """What a case may take, by framework, cards and compilation."""
    ranks = case.cards if case.framework != "one-process" else 0
    compiled = _COMPILE_SECONDS if "compile" in case.features else 0.0
    return _START_SECONDS + _SECONDS_A_RANK * ranks + compiled


def machine_kind(vendor: str) -> str:
    """The kind of machine that durations are recorded for: of a host, its instructions and cores."""
    if vendor != HOST:
        return vendor
    return f"{vendor}-{platform.machine() or 'unknown'}-{os.cpu_count() or 1}"


def history_file() -> Path:
    """Where this user's runs are recorded."""
    return cache_folder() / "smoke-history.json"


def read_history(path: Path) -> History:
    """What is recorded in `path`; a file that cannot be read is a history with a `problem`."""
    if not path.exists():
        return History(schema=SCHEMA)
    try:
        return read_record(History, path)
    except UnreadableFileError as error:
        return History(schema=SCHEMA, problem=f"not used: {error}")


def record_runs(path: Path, machine: str, runs: Iterable[tuple[Case, RecordedRun]]) -> None:
    """Add runs to the history in `path`, which other processes may be adding to.

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
    """The median of those that passed; where none did, the longest: a hang may come again."""
    passed = [run.seconds for run in runs if run.outcome is Outcome.PASS]
    return median(passed) if passed else max(run.seconds for run in runs)
