"""Progress events from a child process to its parent, over a pipe."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from assay.foreign_text import one_line
from assay.progress import Progress, Task

# Begins a child's line of progress. Text without a newline, such as another library's progress
# bar, may precede it in the line, so the mark begins with a character that is not in such text.
_WIRE_MARK = "\x1eassay "

# More frequent updates would be unreadable.
_WIRE_SECONDS = 0.1

Event = dict[str, Any]


def write_event(descriptor: int, event: Event) -> None:
    """Write one event in one system call, as several processes may share the pipe."""
    os.write(descriptor, f"{_WIRE_MARK}{json.dumps(event)}\n".encode())


class _WireTask:
    """A task that sends its number of finished parts, at most every `_WIRE_SECONDS`."""

    def __init__(self, send: Callable[[Event], None], key: str) -> None:
        self._send, self._key = send, key
        self._done = 0.0
        self._sent = time.monotonic()

    def advance(self, amount: float = 1) -> None:
        self._done += amount
        if time.monotonic() - self._sent >= _WIRE_SECONDS:
            self.flush()

    def flush(self) -> None:
        self._sent = time.monotonic()
        self._send({"task": self._key, "done": self._done})


class WireProgress(Progress):
    """A display that sends tasks and notes as events to a `WireReader` in the parent."""

    def __init__(self, send: Callable[[Event], None]) -> None:
        self._send = send
        self._num_tasks = 0

    @contextmanager
    def open_task(self, description: str, total: float | None, unit: str) -> Iterator[Task]:
        """Begin a task, with events for its begin, progress and end."""
        self._num_tasks += 1
        key = f"{os.getpid()}.{self._num_tasks}"
        self._send({"task": key, "begin": description, "total": total, "unit": unit})
        task = _WireTask(self._send, key)
        try:
            yield task
        finally:
            task.flush()
            self._send({"task": key, "end": True})

    def note(self, text: str) -> None:
        """Send one line."""
        self._send({"note": text})


class WireReader:
    """A reader that shows the events of a child on `progress`."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, tuple[AbstractContextManager[Task], Task, float]] = {}
        self._descriptions: dict[str, str] = {}

    def read_line(self, line: str) -> str:
        """Show the event in a line without its newline. Returns: the other text of the line."""
        text, mark, event = line.partition(_WIRE_MARK)
        if mark:
            try:
                self.show(json.loads(event))
            except (ValueError, KeyError, TypeError, AttributeError):
                return line
        return text.rstrip("\r")

    def show(self, event: Event) -> None:
        """Show one event. Raises: KeyError or TypeError for an invalid event."""
        if "note" in event:
            self._progress.note(one_line(event["note"]))
            return
        key = event["task"]
        if "begin" in event:
            total = None if event["total"] is None else float(event["total"])
            context: AbstractContextManager[Task] = self._progress.task(
                one_line(event["begin"]), total, one_line(event["unit"])
            )
            self._tasks[key] = (context, context.__enter__(), 0.0)
            self._descriptions[key] = one_line(event["begin"])
        elif "done" in event:
            opened, task, before = self._tasks[key]
            task.advance(event["done"] - before)
            self._tasks[key] = (opened, task, event["done"])
        else:
            self._tasks.pop(key)[0].__exit__(None, None, None)

    @property
    def open_tasks(self) -> list[str]:
        """Return the descriptions of the tasks that have not ended, the outermost first."""
        return [self._descriptions[key] for key in tuple(self._tasks)]

    def close(self) -> None:
        """End the tasks that the child left open, the innermost first."""
        while self._tasks:
            self._tasks.popitem()[1][0].__exit__(None, None, None)
