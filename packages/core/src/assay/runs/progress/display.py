"""The display of progress: bars on a terminal, plain lines elsewhere."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from assay.progress import Progress, Task
from assay.runs.progress.shown_tasks import ShownTask

_LINE_SECONDS = 10.0  # more often would fill logs
_TICK_SECONDS = 0.5


class LineProgress(Progress):
    """A display of plain lines for logs: for tasks over two seconds, and every ten seconds.

    Call `tick` every half second.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.RLock()
        self._open: list[ShownTask] = []
        self._written = time.monotonic()

    @contextmanager
    def open_task(self, description: str, total: float | None, unit: str) -> Iterator[Task]:
        """Begin a task within the caller's open task."""
        task = ShownTask(description, total, unit)
        with self._lock:
            self._open.append(task)
        try:
            yield task
        finally:
            with self._lock:
                self._open.remove(task)
                if task.has_own_lines:
                    self.note(task.describe_end())

    def note(self, text: str) -> None:
        """Print `text` as a line."""
        with self._lock:
            self._stream.write(text + "\n")
            self._stream.flush()
            self._written = time.monotonic()

    def tick(self) -> None:
        """Print the lines that are due, for new tasks and for the current one."""
        with self._lock:
            outer = {id(one) for task in self._open for one in task.chain[:-1]}
            innermost = [task for task in self._open if id(task) not in outer]
            for task in innermost:
                if task.has_own_lines and not task.shown:
                    self._show(task, f"{task} ...")
            # A new task waits, even if the last line is old.
            waiting = [task for task in innermost if task.chain[0].seconds >= _LINE_SECONDS]
            if waiting and time.monotonic() - self._written >= _LINE_SECONDS:
                task = min(waiting, key=lambda one: one.shown)
                self._show(task, task.describe_state())

    def _show(self, task: ShownTask, text: str) -> None:
        for one in task.chain:
            one.shown = time.monotonic()
        self.note(text)


@contextmanager
def open_progress(stream: TextIO | None = None) -> Iterator[Progress]:
    """Open a display on `stream`, by default standard error: bars on a terminal, else lines."""
    stream = sys.stderr if stream is None else stream
    if stream.isatty():
        from assay.runs.progress.bars import BarProgress

        with BarProgress(stream) as bars:
            yield bars
        return
    lines, ended = LineProgress(stream), threading.Event()

    def tick() -> None:
        while not ended.wait(_TICK_SECONDS):
            lines.tick()

    threading.Thread(target=tick, daemon=True).start()
    try:
        yield lines
    finally:
        ended.set()
