"""Orders cases by value, new pairs of words per second, and selects those that fit a budget of time."""

import heapq
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from assay.errors import UsageError
from assay_smoke.matrix.cases import Case
from assay_smoke.matrix.coverage import Pair, pairs_of

_BUDGET = re.compile(
    r"(?:(?P<hours>\d+(?:\.\d+)?)h)?(?:(?P<minutes>\d+(?:\.\d+)?)m)?(?:(?P<seconds>\d+(?:\.\d+)?)s)?"
)
_SECONDS = {"hours": 3600, "minutes": 60, "seconds": 1}


@dataclass(frozen=True, slots=True)
class OrderedCase:
    """A case at its place in the order."""

    case: Case
    new_pairs: tuple[Pair, ...]
    """Pairs of words that no earlier case has."""


def order_by_value(
    cases: Sequence[Case],
    urgency: Callable[[Case], tuple[bool, ...]],
    expected_seconds: Callable[[Case], float],
) -> list[OrderedCase]:
    """Order `cases` by falling urgency, then by new pairs per second."""
    seen: set[Pair] = set()

    def rank(case: Case) -> tuple[list[bool], float, float, str]:
        new = len(set(pairs_of(case)) - seen)
        seconds = max(expected_seconds(case), 1e-9)
        return [not urgent for urgent in urgency(case)], -new / seconds, seconds, case.id

    queue = [(rank(case), number) for number, case in enumerate(cases)]
    heapq.heapify(queue)
    ordered = []
    while queue:
        case = cases[queue[0][1]]
        # New pairs only become fewer, so a case that stays first after its recount is the best.
        if (renewed := (rank(case), queue[0][1])) > queue[0]:
            heapq.heapreplace(queue, renewed)
            continue
        heapq.heappop(queue)
        new = set(pairs_of(case)) - seen
        seen |= new
        ordered.append(OrderedCase(case, tuple(sorted(new))))
    return ordered


class TimedJob(NamedTuple):
    """A case to schedule."""

    slots: int
    """Number of slots of the machine that the case occupies."""
    seconds: float


def schedule_jobs(
    jobs: Sequence[TimedJob], num_slots: int, budget_seconds: float | None = None
) -> tuple[list[int], float]:
    """Schedule all jobs, the longest first, on a machine with one slot per card.

    A host has one slot: its cases share the cores. The ranks of a job that needs more slots than there
    are share all of them. With a budget, schedule the jobs that end within it, in the given order. If not
    even one fits, schedule the first.

    Returns: the numbers of the scheduled jobs, and the end of the last.
    """
    free_at = [0.0] * num_slots  # in rising order
    numbers = list(range(len(jobs)))
    if budget_seconds is None:
        numbers.sort(key=lambda number: -jobs[number].seconds)
    scheduled: list[int] = []
    for number in numbers:
        needed = min(jobs[number].slots, num_slots)
        end = free_at[needed - 1] + jobs[number].seconds
        if budget_seconds is None or end <= budget_seconds:
            free_at[:needed] = [end] * needed
            free_at.sort()
            scheduled.append(number)
    if jobs and not scheduled:
        return [0], jobs[0].seconds
    return scheduled, free_at[-1]


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
