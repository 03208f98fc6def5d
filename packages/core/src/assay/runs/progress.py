"""Progress of a run across processes; `assay.runs.progress_display` shows it.

All output goes to standard error. A child process writes progress as lines that its parent shows.
"""

import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

# Begins a child's line of progress. Text without a newline, such as another library's progress
# bar, may precede it in the line, so the mark begins with a character that is not in such text.
_WIRE_MARK = "\x1eassay "

# More updates than this could not be read.
_WIRE_SECONDS = 0.1


class Task(Protocol):
    """A task in progress, from `Progress.task`."""

    def advance(self, amount: float = 1) -> None:
        """Count `amount` more parts as done."""


class Progress(ABC):
    """Base of all displays of tasks."""

    @abstractmethod
    def task(self, description: str, total: float | None) -> AbstractContextManager[Task]:
        """Begin a task of `total` parts (None if unknown), which ends on exit."""

    @abstractmethod
    def note(self, text: str) -> None:
        """Show one line."""

    def step(self, description: str) -> AbstractContextManager[Task]:
        """Begin a task of one part, which ends on exit."""
        return self.task(description, None)


class PacedCounter(ABC):
    """Base of tasks that are shown at most every `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.done = 0.0
        self._seconds = seconds
        self._shown = time.monotonic()

    def advance(self, amount: float = 1) -> None:
        """Count `amount` more parts; call `show` if its last call was `seconds` ago."""
        self.done += amount
        if time.monotonic() - self._shown >= self._seconds:
            self._shown = time.monotonic()
            self.show()

    @abstractmethod
    def show(self) -> None:
        """Show the number of parts done; called by `advance`."""


class SilentProgress(Progress):
    """Shows nothing; for use as a library."""

    @contextmanager
    def task(self, description: str, total: float | None) -> Iterator[Task]:  # noqa: ARG002
        """Begin a task that is not shown."""
        yield _SilentTask()

    def note(self, text: str) -> None:
        """Drop `text`."""


class _SilentTask:
    def advance(self, amount: float = 1) -> None:
        pass


class _WireTask(PacedCounter):
    def __init__(self, wire: "WireProgress", key: str) -> None:
        super().__init__(_WIRE_SECONDS)
        self._wire, self._key = wire, key

    def show(self) -> None:
        self._wire.send({"task": self._key, "done": self.done})


class WireProgress(Progress):
    """Writes tasks as lines to a pipe, which the parent reads with `WireReader`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._num_tasks = 0

    @contextmanager
    def task(self, description: str, total: float | None) -> Iterator[Task]:
        """Begin a task, with lines for its begin, progress and end."""
        self._num_tasks += 1
        key = f"{os.getpid()}.{self._num_tasks}"
        self.send({"task": key, "begin": description, "total": total})
        task = _WireTask(self, key)
        try:
            yield task
        finally:
            if task.done:
                task.show()
            self.send({"task": key, "end": True})

    def note(self, text: str) -> None:
        """Write `text` as a plain line."""
        os.write(self._descriptor, (text + "\n").encode())

    def send(self, event: dict[str, Any]) -> None:
        """Write one event in one system call, since several processes may share the pipe."""
        os.write(self._descriptor, f"{_WIRE_MARK}{json.dumps(event)}\n".encode())


class WireReader:
    """Reads the lines of a child: shows tasks on `progress`, calls `take_text` with all other text."""

    def __init__(self, progress: Progress, take_text: Callable[[str], None]) -> None:
        self._progress, self._take_text = progress, take_text
        self._tasks: dict[str, tuple[AbstractContextManager[Task], Task, float]] = {}

    def read_line(self, line: str) -> None:
        """Read one line, without its newline."""
        text, mark, event = line.partition(_WIRE_MARK)
        if text:
            self._take_text(text.rstrip("\r"))
        if mark:
            try:
                self._show(json.loads(event))
            except (ValueError, KeyError, TypeError, AttributeError):
                self._take_text(mark + event)

    def _show(self, event: dict[str, Any]) -> None:
        key = event["task"]
        if "begin" in event:
            context = self._progress.task(str(event["begin"]), event["total"])
            self._tasks[key] = (context, context.__enter__(), 0.0)
        elif "done" in event:
            context, task, before = self._tasks[key]
            task.advance(event["done"] - before)
            self._tasks[key] = (context, task, event["done"])
        else:
            self._tasks.pop(key)[0].__exit__(None, None, None)

    def close(self) -> None:
        """End the tasks that the child left open."""
        for context, _, _ in self._tasks.values():
            context.__exit__(None, None, None)
        self._tasks.clear()
