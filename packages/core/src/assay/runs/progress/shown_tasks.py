"""Text for tasks in progress."""

import time

from assay.progress import format_duration, innermost_task

SHORT_SECONDS = 2.0  # a shorter task is over before its line is read


class ShownTask:
    """A task and the text that describes it.

    chain: the enclosing tasks, outermost first, and this task.
    shown: time of the last line about it; 0 before the first.
    """

    def __init__(self, description: str, total: float | None, unit: str) -> None:
        outer = innermost_task()
        self.chain: list[ShownTask] = [*(outer.chain if isinstance(outer, ShownTask) else ()), self]
        self.total, self.done, self.shown = total, 0.0, 0.0
        self._description, self._unit = description, unit
        self._started, self._advanced, self._largest = time.monotonic(), 0.0, 0.0

    def advance(self, amount: float = 1) -> None:
        """Count `amount` more parts as done."""
        self.done += amount
        self._largest = max(self._largest, amount)
        self._advanced = self.seconds

    @property
    def seconds(self) -> float:
        """Return the seconds since the task began."""
        return time.monotonic() - self._started

    @property
    def seconds_left(self) -> float | None:
        """Estimate the seconds left from the finished parts. Return None before the first one."""
        if not self.total or not 0 < self.done < self.total:
            return None
        # The part in progress may already have taken longer.
        of_a_part = max(self._advanced / self.done, self.seconds / (self.done + self._largest))
        return max(0.0, of_a_part * self.total - self.seconds)

    @property
    def has_own_lines(self) -> bool:
        """Return True for a long task, unless an enclosing task counts parts."""
        return self.seconds >= SHORT_SECONDS and all(one.total is None for one in self.chain[:-1])

    def __str__(self) -> str:
        if len(self.chain) > 1:
            return f"{self.chain[-2]}: {self._label()}"
        return self._label()

    def _label(self) -> str:
        if self.total is None:
            return self._description
        counted = f"{round(self.done, 1):g} of {round(self.total, 1):g} {self._unit}"
        return f"{self._description}, {counted.rstrip()}"

    def describe_state(self) -> str:
        """Describe the time taken, and the time left of the outermost task with a known rate."""
        timed = next((one for one in self.chain if one.seconds_left is not None), self)
        text, left = f"{self}: {format_duration(timed.seconds)} so far", timed.seconds_left
        return text if left is None else f"{text}, about {format_duration(left)} left"

    def describe_end(self) -> str:
        """Describe the time that the task took."""
        return f"{self}: {format_duration(self.seconds)}"
