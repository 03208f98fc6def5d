"""Tables as Markdown: printed, and put into a document between two marks."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

DETECTION = Path(__file__).parents[4] / "docs" / "detection.md"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose columns are as wide as they need to be in the source, too."""
    lines = [list(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))} |"
        for line in lines
    )


def number(value: float | None) -> str:
    """Three digits; nothing for None."""
    if value is None:
        return ""
    return "0" if value == 0 else f"{value:.3g}" if math.isfinite(value) else str(value)


def publish(text: str, mark: str, document: Path = DETECTION) -> None:
    """Put `text` where `document` has it between `<!-- MARK -->` and `<!-- end of MARK -->`."""
    begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->"
    before, _, rest = document.read_text(encoding="utf-8").partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{document} has no place marked {mark!r}")
    document.write_text(f"{before}{begin}\n{text}\n\n{end}{after}", encoding="utf-8")
