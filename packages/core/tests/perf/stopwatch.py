"""Times of works that take turns: whatever slows the machine down slows all of them."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Self

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds: by the clock, and of processor time, which other processes do not lengthen."""

    wall: float
    cpu: float

    @classmethod
    def of(cls, work: Work) -> Self:
        """The times of one run."""
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        return cls(time.perf_counter() - wall, time.process_time() - cpu)

    def __add__(self, other: "Times") -> "Times":
        return Times(self.wall + other.wall, self.cpu + other.cpu)

    def __sub__(self, other: "Times") -> "Times":
        return Times(self.wall - other.wall, self.cpu - other.cpu)

    def over(self, other: "Times") -> "Times":
        """How many times as long as `other`."""
        return Times(self.wall / other.wall, self.cpu / other.cpu)


NO_TIME = Times(0.0, 0.0)


def median_times(times: list[Times]) -> Times:
    """The median of each."""
    return Times(median(one.wall for one in times), median(one.cpu for one in times))


def take_turns(works: Mapping[str, Work], rounds: int) -> dict[str, list[Times]]:
    """Run all works once for warming up, then in turns."""
    for work in works.values():
        work()
    times: dict[str, list[Times]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            times[name].append(Times.of(work))
    return times


def median_ratio(times: list[Times], others: list[Times]) -> Times:
    """The median over the rounds of how many times as long as `others` it took."""
    return median_times([one.over(other) for one, other in zip(times, others, strict=True)])
