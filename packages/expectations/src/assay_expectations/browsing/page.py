"""The page: a table of cells, and each expectation with its git history."""

import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from assay.files import write_whole
from assay.output.pages import page_environment
from assay_expectations.browsing.cells import Cell, State

_TEMPLATES = Path(__file__).with_name("templates")

# The states that need attention come first.
_STATES: tuple[State, ...] = ("fail", "stale", "missing", "unseen", "pass")

_TIMEOUT_SECONDS = 20.0
_NUM_FIELDS = 3
_FORMAT = ("--date=short", "--format=%ad%x00%an%x00%s")


def write_page(cells: Sequence[Cell], date: str, file: Path) -> Path:
    """Write the page of `cells`, which are in row order. Returns: the file."""
    environment = page_environment(_TEMPLATES)
    rows: dict[str, list[Cell]] = {}
    for cell in cells:
        rows.setdefault(cell.model, []).append(cell)
    counts = Counter(cell.state for cell in cells)
    page = environment.get_template("expectations.html.j2").render(
        rows=rows,
        machines=[cell.machine for cell in next(iter(rows.values()))],
        counts={state: counts[state] for state in _STATES if counts[state]},
        history={cell.file: _commits_of(cell.file) for cell in cells if cell.file},
        date=date,
    )
    return write_whole(file, page)


def _commits_of(file: Path) -> list[list[str]]:
    """Return date, author and subject of the commits that changed `file`, the newest first.

    Outside of a repository there are none.
    """
    try:
        done = subprocess.run(
            ["git", "log", "--follow", *_FORMAT, "--", file.name],  # noqa: S607 - the user's git
            cwd=file.parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=_TIMEOUT_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split("\0") for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == _NUM_FIELDS]
