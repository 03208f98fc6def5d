"""Expected times of cases on one machine, and the cases that fit a budget of time."""

import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from assay.errors import UsageError

_BUDGET = re.compile(
    r"(?:(?P<hours>\d+(?:\.\d+)?)h)?(?:(?P<minutes>\d+(?:\.\d+)?)m)?(?:(?P<seconds>\d+(?:\.\d+)?)s)?"
)
_SECONDS = {"hours": 3600, "minutes": 60, "seconds": 1}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Job(Generic[T]):
    """A case to schedule."""

    item: T
    slots: int
    """Number of slots of the machine that the case occupies."""
    seconds: float


@dataclass(slots=True)
class Schedule(Generic[T]):
    """Jobs on a machine with one slot per card. A host has one slot: its cases share the cores."""

    num_slots: int
    jobs: list[Job[T]] = field(default_factory=list)
    _free_at: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self._free_at = [0.0] * self.num_slots

    @property
    def seconds(self) -> float:
        """Return the end of the last job."""
        return max(self._free_at)

    def end_of(self, job: Job[T]) -> float:
        """Return the end of `job` if it starts as soon as enough slots are free."""
        return sorted(self._free_at)[self._needed(job) - 1] + job.seconds

    def add(self, job: Job[T]) -> None:
        """Run `job` on the slots that are free first."""
        end = self.end_of(job)
        taken = heapq.nsmallest(self._needed(job), range(self.num_slots), self._free_at.__getitem__)
        for slot in taken:
            self._free_at[slot] = end
        self.jobs.append(job)

    def _needed(self, job: Job[T]) -> int:
        # The ranks of a job that needs more slots than there are share all of them.
        return min(job.slots, self.num_slots)


def schedule_jobs(
    jobs: Sequence[Job[T]], num_slots: int, budget_seconds: float | None = None
) -> Schedule[T]:
    """Schedule all jobs, the longest first.

    With a budget, schedule the jobs that end within it, in the given order. If not even one fits,
    schedule the first.
    """
    schedule: Schedule[T] = Schedule(num_slots)
    if budget_seconds is None:
        for job in sorted(jobs, key=lambda job: -job.seconds):
            schedule.add(job)
        return schedule
    for job in jobs:
        if schedule.end_of(job) <= budget_seconds:
            schedule.add(job)
    if jobs and not schedule.jobs:
        schedule.add(jobs[0])
    return schedule


def parse_budget(text: str) -> float:
    """Return the seconds of a time such as "30m", "90s" or "1h30m".

    Raises: UsageError for any other text and for zero.
    """
    found = _BUDGET.fullmatch(text.strip())
    parts = found.groupdict() if found else {}
    seconds = sum(float(number) * _SECONDS[unit] for unit, number in parts.items() if number)
    if seconds <= 0:
        raise UsageError(f"--budget {text}: a time with its unit is needed, as in 30m or 1h30m")
    return seconds
