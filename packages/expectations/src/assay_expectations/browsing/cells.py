"""Cells of the page: a model on a machine, its expectation, and its newest verdict."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from assay.errors import UsageError
from assay.runs.results import VERDICT_FILE, read_verdict
from assay.verdicts import Outcome, Verdict
from assay_expectations.records import Machine, Provenance, read_expectation
from assay_expectations.verifying import find_files

# unseen: captured, but without a verdict.
State = Literal["pass", "fail", "stale", "unseen", "missing"]

_REPORT = "report.html"


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
    """Who approved it, and why; "" if nobody did."""
    age_days: int | None = None
    seen: Sighting | None = None

    @property
    def state(self) -> State:
        """Return the newest state."""
        if self.file is None:
            return "missing"
        return self.seen.state if self.seen else "unseen"


def collect_cells(paths: Sequence[Path], runs: Path, page: Path, now: datetime) -> list[Cell]:
    """Make a cell for each pair of a model and a machine in the expectations of `paths`.

    runs: folder that is searched for verdicts of `assay expect verify`. page: file that links to them.
    Raises: UsageError if there is no expectation, one cannot be read, or two belong to one cell.
    """
    expectations = {file: read_expectation(file) for file in find_files(paths)}
    seen = _sightings(runs, page.parent)
    cells: dict[tuple[str, Machine], Cell] = {}
    for file, expectation in expectations.items():
        key = expectation.model, expectation.key.machine
        if key in cells:
            raise UsageError(
                f"{cells[key].file} and {file} are of one model and machine; delete the stale one"
            )
        captured = str(expectation.provenance.process.get("date", ""))
        cells[key] = Cell(
            model=expectation.model,
            machine=expectation.key.machine,
            file=file,
            captured=captured[:16],
            approved=_approved(expectation.provenance),
            age_days=_days_since(captured, now),
            seen=seen.get(expectation.hash),
        )
    models, machines = (set(parts) for parts in zip(*cells, strict=True))
    return [
        cells.get((model, machine)) or Cell(model, machine)
        for model in sorted(models)
        for machine in sorted(machines, key=lambda one: tuple(one.model_dump().values()))
    ]


def _sightings(runs: Path, page_folder: Path) -> dict[str, Sighting]:
    """Find the newest sighting of each expectation, by its hash."""
    found: dict[str, Sighting] = {}
    for file in runs.rglob(VERDICT_FILE):
        for hash_, sighting in _seen_in(read_verdict(file.parent), file.parent, page_folder):
            if hash_ not in found or _order(found[hash_]) < _order(sighting):
                found[hash_] = sighting
    return found


def _order(sighting: Sighting) -> tuple[str, bool]:
    """Sort by date; at equal dates, a pass comes first."""
    return sighting.date, sighting.state != "pass"


def _seen_in(verdict: Verdict, folder: Path, page_folder: Path) -> Iterator[tuple[str, Sighting]]:
    for level in verdict.levels.values():
        details = level.model_extra or {}
        if level.verdict not in (Outcome.PASS, Outcome.FAIL) or "expectation" not in details:
            continue
        failed: State = "stale" if details.get("stale") else "fail"
        yield (
            str(details["expectation"]),
            Sighting(
                state="pass" if level.verdict is Outcome.PASS else failed,
                date=str(verdict.environment.get("date", "")),
                reason=level.reason or "",
                report=Path(os.path.relpath(folder / _REPORT, page_folder)).as_posix(),
            ),
        )


def _approved(provenance: Provenance) -> str:
    if provenance.approved_by is None:
        return ""
    return provenance.approved_by + (f": {provenance.reason}" if provenance.reason else "")


def _days_since(date: str, now: datetime) -> int | None:
    try:
        then = datetime.fromisoformat(date)
    except ValueError:
        return None
    return (now - (then if then.tzinfo else then.replace(tzinfo=UTC))).days
