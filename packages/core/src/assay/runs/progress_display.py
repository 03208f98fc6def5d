"""The display of progress: bars on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from assay.runs.progress import PacedCounter, Progress, Task

_LINE_SECONDS = 5.0  # more often would fill logs


class _LineTask(PacedCounter):
    def __init__(self, progress: "LineProgress", description: str, total: float | None) -> None:
        super().__init__(_LINE_SECONDS)
        self._progress, self._description, self._total = progress, description, total
        self._started = time.monotonic()
        progress.note(f"{description} ...")

    def show(self) -> None:
        self._progress.note(f"{self._description}: {self._so_far()}")

    def end(self) -> None:
        counted = f"{self._so_far()} in " if self.done or self._total else ""
        seconds = time.monotonic() - self._started
        self._progress.note(f"{self._description}: {counted}{seconds:.1f} s")

    def _so_far(self) -> str:
        return f"{self.done:g}" if self._total is None else f"{self.done:g} of {self._total:g}"


class LineProgress(Progress):
    """Plain lines, for logs: at the begin and end of a task, and every few seconds between."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @contextmanager
    def task(self, description: str, total: float | None) -> Iterator[Task]:
        """Begin a task, with a line for its begin and its end."""
        task = _LineTask(self, description, total)
        try:
            yield task
        finally:
            task.end()

    def note(self, text: str) -> None:
        """Print `text` as a line."""
        self._stream.write(text + "\n")
        self._stream.flush()


@contextmanager
def open_progress(stream: TextIO | None = None) -> Iterator[Progress]:
    """A display on `stream` (by default standard error): bars on a terminal, else plain lines."""
    stream = sys.stderr if stream is None else stream
    if not stream.isatty():
        yield LineProgress(stream)
        return
    from assay.runs.progress_bars import BarProgress

    with BarProgress(stream) as bars:
        yield bars
