"""`rich` consoles for tables and progress bars."""

from collections.abc import Iterable
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from assay.foreign_text import escape_output


class _EscapingConsole(Console):
    """A console that escapes all printed text but keeps its own styles, and ends no line of a file with spaces."""

    def print(self, *objects: Any, **settings: Any) -> None:  # noqa: ANN401 - as rich declares them
        if self.file.isatty() or self.is_jupyter:
            super().print(*objects, **settings)
            return
        with self.capture() as captured:
            super().print(*objects, **settings)
        lines = captured.get().split("\n")
        self.file.write("\n".join(line.rstrip(" ") for line in lines))
        self.file.flush()

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(escape_output(segment.text), segment.style)


def open_console(stream: IO[str] | None = None, *, width: int | None = None) -> Console:
    """Open a console on `stream`, by default standard output.

    width: number of columns; None for the width of the terminal.
    """
    return _EscapingConsole(file=stream, width=width, markup=False, highlight=False)


def open_text_console(stream: IO[str]) -> Console:
    """Open a console that writes plain text to `stream`, even in a notebook."""
    return _EscapingConsole(
        file=stream, color_system=None, force_jupyter=False, markup=False, highlight=False
    )


def new_table(*headings: str, wraps: bool = True) -> Table:
    """Make a table without lines; without `headings` it has no header.

    wraps: let cells continue on the next line instead of cutting them off.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.show_header = bool(headings)
    for heading in headings:
        table.add_column(heading, overflow="fold" if wraps else "ellipsis", no_wrap=not wraps)
    return table
