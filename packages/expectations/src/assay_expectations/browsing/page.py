"""The page: a table of cells, and below it each expectation with its history."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from assay.files import write_whole
from assay.output.pages import page_environment
from assay_expectations.browsing.cells import Cell, State

_TEMPLATES = Path(__file__).with_name("templates")

# What a reader has to look at comes first.
_STATES: tuple[State, ...] = ("fail", "stale", "missing", "unseen", "pass")


def write_page(cells: Sequence[Cell], date: str, file: Path) -> Path:
    """Write the page of `cells`, which come row by row. Returns: the file."""
    environment = page_environment(_TEMPLATES)
    rows: dict[str, list[Cell]] = {}
    for cell in cells:
        rows.setdefault(cell.model, []).append(cell)
    counts = Counter(cell.state for cell in cells)
    page = environment.get_template("expectations.html.j2").render(
        rows=rows,
        machines=[cell.machine for cell in next(iter(rows.values()))],
        counts={state: counts[state] for state in _STATES if counts[state]},
        date=date,
    )
    return write_whole(file, page)
