"""When cases run: on which machine, beside which others, and how many of them a budget holds."""

import heapq
import re
from collections.abc import Iterable, Sequence
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
    """A case to be run.

    slots: how many of a machine's slots it takes; seconds: how long it takes them.
    """

    item: T
    slots: int
    seconds: float


@dataclass(slots=True)
class Machine(Generic[T]):
    """One machine: a slot for each card, or a single one for a host that runs a case at a time."""

    num_slots: int
    jobs: list[Job[T]] = field(default_factory=list)
    _free_at: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self._free_at = [0.0] * self.num_slots

    @property
    def seconds(self) -> float:
        """Until its last job ends."""
        return max(self._free_at)

    def end_of(self, job: Job[T]) -> float:
        """When `job` would end if it began as soon as enough slots are free."""
        return self._begin_of(job) + job.seconds

    def take(self, job: Job[T]) -> None:
        """Run `job` on the slots that are free first."""
        end = self.end_of(job)
        taken = heapq.nsmallest(self._needed(job), range(self.num_slots), self._free_at.__getitem__)
        for slot in taken:
            self._free_at[slot] = end
        self.jobs.append(job)

    def _begin_of(self, job: Job[T]) -> float:
        return sorted(self._free_at)[self._needed(job) - 1]

    def _needed(self, job: Job[T]) -> int:
        # Of a job that needs more than there are, the ranks share all of them.
        return min(job.slots, self.num_slots)


def share_out(jobs: Iterable[Job[T]], machines: Sequence[Machine[T]]) -> None:
    """Give each job to the machine where it ends first; the longest are given first."""
    for job in sorted(jobs, key=lambda job: -job.seconds):
        _first_to_end(job, machines).take(job)


def share_out_within(
    seconds: float, jobs: Iterable[Job[T]], machines: Sequence[Machine[T]]
) -> list[Job[T]]:
    """Give jobs, the most valuable first, to machines that have each so many seconds.

    Where not even one fits, the most valuable is run all the same.
    Returns: the jobs that were left out.
    """
    left = []
    for job in jobs:
        machine = _first_to_end(job, machines)
        if machine.end_of(job) <= seconds:
            machine.take(job)
        else:
            left.append(job)
    if left and not any(machine.jobs for machine in machines):
        machines[0].take(left.pop(0))
    return left


def _first_to_end(job: Job[T], machines: Sequence[Machine[T]]) -> Machine[T]:
    return min(machines, key=lambda machine: machine.end_of(job))


def parse_budget(text: str) -> float:
    """Seconds of a time such as "30m", "90s" or "1h30m".

    Raises: UsageError for anything else, and for no time at all.
    """
    found = _BUDGET.fullmatch(text.strip())
    parts = found.groupdict() if found else {}
    seconds = sum(float(number) * _SECONDS[unit] for unit, number in parts.items() if number)
    if seconds <= 0:
        raise UsageError(f"--budget {text}: a time with its unit is needed, as in 30m or 1h30m")
    return seconds
