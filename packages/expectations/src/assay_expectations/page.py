"""The page of `assay expect page`: a table of models by machines, and each expectation with its git history."""

import os
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from assay.errors import UsageError, assay_command
from assay.files import write_whole
from assay.judge.wording import format_count
from assay.output.pages import page_environment
from assay.runs.results import VERDICT_FILE, read_verdict
from assay.verdicts import Outcome
from assay_expectations.records import Content, Expectation, Machine
from assay_expectations.verdict import SHIPPED

# unseen: captured, but without a verdict.
State = Literal["pass", "fail", "stale", "unseen", "missing"]

_REPORT = "report.html"

_TEMPLATES = Path(__file__).with_name("templates")

# The states that need attention come first.
_STATES: tuple[State, ...] = ("fail", "stale", "missing", "unseen", "pass")

_TIMEOUT_SECONDS = 20.0
_NUM_FIELDS = 3
_HASH_SHOWN = 8
_FORMAT = ("--date=short", "--format=%ad%x00%an%x00%s")


@dataclass(frozen=True, slots=True)
class Sighting:
    """The verdict of a run about one expectation."""

    state: State
    date: str
    """Date of the run, in ISO 8601."""
    reason: str
    report: str
    """Path relative to the page."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One model on one machine."""

    model: str
    machine: Machine
    file: Path | None = None
    """The expectation; None if nothing was captured."""
    captured: str = ""
    """Date of the capture, as YYYY-MM-DDTHH:MM."""
    approved: str = ""
    """Who approved it; "" if nobody did."""
    reason: str = ""
    """Why it was captured or approved."""
    approve: str = ""
    """The command that approves it; "" for a shipped one, or without a pass."""
    age_days: int | None = None
    seen: Sighting | None = None
    num_left_out: int = 0
    """Runs with a setup function, or with other files by `--model`."""

    @property
    def state(self) -> State:
        """Return the newest state."""
        if self.file is None:
            return "missing"
        return self.seen.state if self.seen else "unseen"


def collect_cells(
    expectations: Mapping[Path, Expectation], runs: Path, page: Path, now: datetime
) -> list[Cell]:
    """Make a cell for each pair of a model and a machine in the expectations, which are by file.

    A file with a name of its own, or with other inputs, has a row of its own.

    runs: folder that is searched for verdicts of `assay expect verify`. page: file that links to them.
    Raises: UsageError if two belong to one cell.
    """
    seen, left_out = _sightings(runs, page.parent)
    cells: dict[tuple[str, Machine], Cell] = {}
    for file, expectation in expectations.items():
        content = expectation.key.content
        row = expectation.model
        if file.stem != expectation.name:
            row += f" ({file.stem})"
        elif content.settings.chat:
            row += " (chat)"
        other = cells.get((row, expectation.key.machine))
        if other and other.file and not _has_inputs(expectations[other.file], content):
            row += f" (inputs {content.prompts_hash[:_HASH_SHOWN]})"
        key = row, expectation.key.machine
        if key in cells:
            raise UsageError(
                f"{cells[key].file} and {file} are of one model, machine and inputs; delete the stale one"
            )
        captured = str(expectation.provenance.process.get("date", ""))
        place = file.stem, expectation.hash
        sighting = seen.get(place)
        cells[key] = Cell(
            model=row,
            machine=expectation.key.machine,
            file=file,
            captured=captured[:16],
            approved=expectation.provenance.approved_by or "",
            reason=expectation.provenance.reason or "",
            approve=""
            if file.parent == SHIPPED or sighting is None or sighting.state != "pass"
            else assay_command(
                *("expect", "capture", expectation.model),
                run=expectation.provenance.run,
                output=file,
                approved_by="NAME",
            ),
            age_days=_days_since(captured, now),
            seen=sighting,
            num_left_out=left_out[place],
        )
    models, machines = (set(parts) for parts in zip(*cells, strict=True))
    return [
        cells.get((model, machine)) or Cell(model, machine)
        for model in sorted(models)
        for machine in sorted(machines, key=lambda one: tuple(one.model_dump().values()))
    ]


def _sightings(
    runs: Path, page_folder: Path
) -> tuple[dict[tuple[str, str], Sighting], Counter[tuple[str, str]]]:
    """Find the newest sighting of each expectation, and count its runs of another model.

    Both are by the name of its file and its hash. At equal dates, a pass comes first.
    """
    seen = []
    left_out: Counter[tuple[str, str]] = Counter()
    for file in runs.rglob(VERDICT_FILE):
        verdict = read_verdict(file.parent)
        date = str(verdict.environment.get("date", ""))
        report = Path(os.path.relpath(file.with_name(_REPORT), page_folder)).as_posix()
        for name, level in verdict.levels.items():
            facts = level.model_extra or {}
            if level.verdict in (Outcome.PASS, Outcome.FAIL) and "expectation" in facts:
                failed: State = "stale" if facts.get("stale") else "fail"
                state = "pass" if level.verdict is Outcome.PASS else failed
                sighting = Sighting(state, date, level.reason or "", report)
                place = Path(name).name.removesuffix(".json"), str(facts["expectation"])
                is_of_other_files = "model" in verdict.candidate and state == "stale"
                if "setup" in verdict.candidate or is_of_other_files:
                    left_out[place] += 1
                else:
                    seen.append((place, sighting))
    return dict(sorted(seen, key=lambda pair: (pair[1].date, pair[1].state != "pass"))), left_out


def _has_inputs(expectation: Expectation, content: Content) -> bool:
    then = expectation.key.content
    return (then.settings, then.prompts_hash) == (content.settings, content.prompts_hash)


def _days_since(date: str, now: datetime) -> int | None:
    try:
        then = datetime.fromisoformat(date)
    except ValueError:
        return None
    return (now - (then if then.tzinfo else then.replace(tzinfo=UTC))).days


def write_page(cells: Sequence[Cell], date: str, file: Path) -> Path:
    """Write the page of `cells`, which are in row order. Returns: the file."""
    environment = page_environment(_TEMPLATES)
    rows: dict[str, list[Cell]] = {}
    for cell in cells:
        rows.setdefault(cell.model, []).append(cell)
    page = environment.get_template("expectations.html.j2").render(
        rows=rows,
        machines=[cell.machine for cell in next(iter(rows.values()))],
        counts=_count_states(cells),
        history={cell.file: _commits_of(cell.file) for cell in cells if cell.file},
        date=date,
    )
    return write_whole(file, page)


def describe_states(cells: Sequence[Cell]) -> str:
    """Count the cells of each state, and the runs that are left out, in one line."""
    states = ", ".join(f"{count} {state}" for state, count in _count_states(cells).items())
    number = sum(cell.num_left_out for cell in cells)
    left_out = f"; left out: {format_count(number, 'verdict')} on another model (other files by --model, or a setup function)"
    return states + (left_out if number else "")


def _count_states(cells: Sequence[Cell]) -> dict[State, int]:
    counts = Counter(cell.state for cell in cells)
    return {state: counts[state] for state in _STATES if counts[state]}


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
