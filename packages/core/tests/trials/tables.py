"""Tables of trials: printed as Markdown, and published as CSV files that a document sums up."""

import csv
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

DETECTION = Path(__file__).parents[4] / "docs" / "detection.md"
# A cell ends at a bar that is not escaped.
_BAR = re.compile(r"(?<!\\)\|")


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table with aligned columns."""
    lines = [list(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))} |"
        for line in lines
    )


def number(value: float | None) -> str:
    """Return three digits; nothing for None."""
    if value is None:
        return ""
    return "0" if value == 0 else f"{value:.3g}" if math.isfinite(value) else str(value)


def publish(mark: str, totals: str, document: Path = DETECTION, **tables: str) -> None:
    """Put `totals` between `<!-- MARK -->` and `<!-- end of MARK -->`, and each table into a CSV file.

    tables: Markdown tables by the name of the file, which lies in a folder named like `document`.
    """
    begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->"
    before, _, rest = document.read_text(encoding="utf-8").partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{document} has no place marked {mark!r}")
    document.write_text(f"{before}{begin}\n{totals}\n\n{end}{after}", encoding="utf-8")
    folder = document.with_suffix("")
    folder.mkdir(exist_ok=True)
    for name, text in tables.items():
        file = folder / f"{name.replace('_', '-')}.csv"
        with file.open("w", encoding="utf-8", newline="") as stream:
            csv.writer(stream, lineterminator="\n").writerows(read_markdown_table(text))


def read_markdown_table(text: str) -> list[list[str]]:
    """Return the cells of a table that `markdown_table` wrote, head first."""
    lines = text.strip().splitlines()
    return [
        [cell.strip().replace("\\|", "|") for cell in _BAR.split(line)[1:-1]]
        for line in (lines[0], *lines[2:])
    ]
