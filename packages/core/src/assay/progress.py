"""Tasks of a run, and their progress.

Deeply nested code advances the innermost open task (`advance_task`) or opens a task within it
(`subtask`, `counted`). Without a display these calls have no effect.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar

T = TypeVar("T")


class Task(Protocol):
    """A task in progress, from `Progress.task`."""

    def advance(self, amount: float = 1) -> None:
        """Count `amount` more parts as done."""


class Progress(ABC):
    """Base of all displays of tasks."""

    _phase = _num_phases = 0

    @abstractmethod
    def open_task(
        self, description: str, total: float | None, unit: str
    ) -> AbstractContextManager[Task]:
        """Show a task until it ends. `task` calls this."""

    @abstractmethod
    def note(self, text: str) -> None:
        """Show one line."""

    def number_phases(self, total: int) -> None:
        """Show how many of the `total` tasks of this process are done: displays leave out short ones."""
        self._num_phases = total

    @contextmanager
    def task(self, description: str, total: float | None, unit: str = "") -> Iterator[Task]:
        """Begin a task of `total` parts (None if unknown), which ends on exit.

        unit: the name of the parts, in the plural, such as "tensors".
        """
        if self._num_phases and _INNERMOST.get()[0] is not self:
            self._phase += 1
            self._num_phases = max(self._phase, self._num_phases)
            done = self._phase - 1
            description = f"{done} of {self._num_phases} steps done: {description}"
        with self.open_task(description, total, unit) as task:
            token = _INNERMOST.set((self, task, unit))
            try:
                yield task
            finally:
                _INNERMOST.reset(token)

    def step(self, description: str) -> AbstractContextManager[Task]:
        """Begin a task of one part, which ends on exit."""
        return self.task(description, None)


# From here on, durations are given in minutes.
_MINUTES_FROM_SECONDS = 100


def format_duration(seconds: float) -> str:
    """Write a duration in seconds or minutes.

    >>> format_duration(99.4), format_duration(239.7)
    ('99 s', '4 min 0 s')
    """
    if seconds < _MINUTES_FROM_SECONDS:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def format_size(num_bytes: int) -> str:
    """Write a number of bytes in its largest unit.

    >>> format_size(10), format_size(931_300_000), format_size(9_900_000_000)
    ('10 bytes', '931.3 MB', '9.9 GB')
    """
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"


class SilentProgress(Progress):
    """A silent display, for use as a library."""

    @contextmanager
    def open_task(self, description: str, total: float | None, unit: str) -> Iterator[Task]:  # noqa: ARG002
        """Begin a task that is not shown."""
        yield _SilentTask()

    def note(self, text: str) -> None:
        """Drop `text`."""


class _SilentTask:
    def advance(self, amount: float = 1) -> None:
        pass


# The display of the innermost task, the task, and its unit.
_INNERMOST: ContextVar[tuple[Progress, Task, str]] = ContextVar(
    "assay_innermost_task", default=(SilentProgress(), _SilentTask(), "")
)


def innermost_task() -> Task:
    """Return the task opened last in this thread, or in the thread whose context it copied."""
    return _INNERMOST.get()[1]


def advance_task(unit: str, amount: float = 1) -> None:
    """Count `amount` more parts of the innermost open task as done if its unit is `unit`."""
    _, task, counted_unit = _INNERMOST.get()
    if unit == counted_unit:
        task.advance(amount)


def subtask(
    description: str, total: float | None = None, unit: str = ""
) -> AbstractContextManager[Task]:
    """Begin a task within the innermost open one, with the arguments of `Progress.task`."""
    return _INNERMOST.get()[0].task(description, total, unit)


def counted(description: str, items: Collection[T], unit: str) -> Iterator[T]:
    """Iterate over `items` and count them in a task within the innermost open one."""
    with subtask(description, len(items), unit) as task:
        for item in items:
            yield item
            task.advance()
