"""Progress bars on a terminal."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TextIO

from rich import progress as rich_progress
from rich.text import Text

from assay.output.console import open_console
from assay.runs.progress import Progress


class _Bar:
    def __init__(self, bars: rich_progress.Progress, key: rich_progress.TaskID) -> None:
        self._bars, self._key = bars, key

    def advance(self, amount: float = 1) -> None:
        self._bars.advance(self._key, amount)


class BarProgress(Progress):
    """One bar for each task; bars of finished tasks stay until the end."""

    def __init__(self, stream: TextIO) -> None:
        self._bars = rich_progress.Progress(
            rich_progress.TextColumn("{task.description}", markup=False),
            rich_progress.BarColumn(),
            rich_progress.MofNCompleteColumn(),
            rich_progress.TimeElapsedColumn(),
            console=open_console(stream),
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bars.stop()

    @contextmanager
    def task(self, description: str, total: float | None) -> Iterator[_Bar]:
        """Begin a task with a bar of its own."""
        key = self._bars.add_task(description, total=total)
        try:
            yield _Bar(self._bars, key)
        finally:
            if total is None:
                self._bars.update(key, total=1, completed=1)
            self._bars.stop_task(key)

    def note(self, text: str) -> None:
        """Print `text` above the bars."""
        self._bars.console.print(Text(text), soft_wrap=True)
