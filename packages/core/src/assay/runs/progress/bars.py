"""Progress bars on a terminal."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self, TextIO

from rich import progress as rich_progress
from rich.text import Text

from assay.output.console import open_console
from assay.progress import Progress
from assay.runs.progress.shown_tasks import ShownTask


class _Bar(ShownTask):
    def __init__(
        self, bars: rich_progress.Progress, description: str, total: float | None, unit: str
    ) -> None:
        super().__init__(description, total, unit)
        self._bars = bars
        self.key = bars.add_task(description, total=total, unit=unit)

    def advance(self, amount: float = 1) -> None:
        super().advance(amount)
        self._bars.advance(self.key, amount)


class BarProgress(Progress):
    """A display with a bar for each open task, outer ones first, and a line after each long task."""

    def __init__(self, stream: TextIO) -> None:
        self._bars = rich_progress.Progress(
            rich_progress.TextColumn("{task.description}", markup=False),
            rich_progress.BarColumn(),
            rich_progress.MofNCompleteColumn(),
            rich_progress.TextColumn("{task.fields[unit]}", markup=False),
            rich_progress.TimeElapsedColumn(),
            rich_progress.TextColumn("left:"),
            rich_progress.TimeRemainingColumn(),
            console=open_console(stream),
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    @contextmanager
    def open_task(self, description: str, total: float | None, unit: str) -> Iterator[_Bar]:
        """Begin a task with a bar. At its end the bar becomes a line."""
        bar = _Bar(self._bars, description, total, unit)
        try:
            yield bar
        finally:
            self._bars.remove_task(bar.key)
            if bar.has_own_lines:
                self.note(bar.describe_end())

    def note(self, text: str) -> None:
        """Print `text` above the bars."""
        self._bars.console.print(Text(text), soft_wrap=True)
