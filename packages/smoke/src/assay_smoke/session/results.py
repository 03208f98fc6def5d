"""Results of a session as JSON, in two sentences and as an HTML page."""

from collections import Counter
from pathlib import Path
from typing import get_args

from pydantic import Field

from assay.files import write_whole
from assay.output.pages import page_environment
from assay.verdicts import SCHEMA, Outcome, Record, Verdict
from assay_smoke.cases.timeline import CyclePhase, PhaseTime, read_timeline

PAGE_FILE = "index.html"

_TEMPLATES = Path(__file__).with_name("templates")


class PhaseSeconds(Record):
    """A phase of a world on its slowest rank, in seconds since the case began."""

    world: str
    phase: CyclePhase
    number: int | None = None
    begin: float
    end: float
    finished: bool = True
    """False if the process ended within the phase."""


class CaseResult(Record):
    """The result of a case or library."""

    name: str
    outcome: Outcome
    seconds: float
    reason: str | None = None
    """Texts of the levels that failed or were not compared. For a PASS, text of an unchecked level."""
    diagnosis: str | None = None
    error: str | None = None
    """Why the item could not be judged: a missing dependency, or a library that contradicts its file."""
    infrastructure: str | None = None
    """Failure of the machine in the last try, unrelated to the case."""
    tries: int = 1
    tried_again_for: str | None = None
    """Failure of the machine in the try before."""
    command: str = ""
    """Command that runs the item alone."""
    folder: str = ""
    """Folder of its verdict, report and logs, relative to that of the session."""
    phases: list[PhaseSeconds] = Field(default_factory=list)
    host_bytes: int = 0
    """Peak memory of any rank."""
    device_bytes: int = 0

    @property
    def word(self) -> str:
        """Return the outcome, or ERROR if there was nothing to judge."""
        return "ERROR" if self.error else self.outcome.value


class SessionReport(Record):
    """Results of a session in the order in which the items ended."""

    schema_: int = Field(default=SCHEMA, alias="schema")
    device: str
    cases: list[CaseResult]
    seconds: float
    pairs_covered: int
    pairs_possible: int

    @property
    def exit_code(self) -> int:
        """Return 2 for an error or a failure of the machine, otherwise 1, 3 or 0 by the outcomes."""
        if any(
            case.error or (case.infrastructure and case.outcome is not Outcome.PASS)
            for case in self.cases
        ):
            return 2
        outcomes = {case.outcome for case in self.cases}
        if Outcome.FAIL in outcomes:
            return Outcome.FAIL.exit_code
        if Outcome.NOT_COMPARED in outcomes or not self.cases:
            return Outcome.NOT_COMPARED.exit_code
        return Outcome.PASS.exit_code


def reason_of(verdict: Verdict) -> str | None:
    """Return the reasons of failed levels, else of uncompared ones, or of an unchecked one in a PASS."""
    for outcome in (Outcome.FAIL, Outcome.NOT_COMPARED):
        reasons = [
            f"{name}: {level.reason or (level.model_extra or {}).get('worst') or 'over its limit'}"
            for name, level in verdict.levels.items()
            if level.verdict is outcome
        ]
        if reasons:
            return "; also ".join(reasons)
    for name, level in verdict.levels.items():
        if (level.model_extra or {}).get("unchecked"):
            return f"{name}: {level.reason}"
    return None


def phases_of(folder: Path) -> list[PhaseSeconds]:
    """Read the phases of each world from the timeline of its slowest rank."""
    of_worlds = _worlds(folder)
    start = min((ranks[0][0].begin for ranks in of_worlds.values()), default=0.0)
    return [
        PhaseSeconds(
            world=world,
            phase=phase.phase,
            number=phase.number,
            begin=phase.begin - start,
            end=(phase.end if phase.end is not None else phase.begin) - start,
            finished=phase.end is not None,
        )
        for world, ranks in of_worlds.items()
        for phase in max(ranks, key=_end_of)
    ]


def peak_memory(folder: Path) -> tuple[int, int]:
    """Return the peak host and device memory of any rank, in bytes."""
    phases = [phase for ranks in _worlds(folder).values() for rank in ranks for phase in rank]
    return (
        max((phase.host_bytes for phase in phases), default=0),
        max((phase.device_bytes for phase in phases), default=0),
    )


def _worlds(folder: Path) -> dict[str, list[list[PhaseTime]]]:
    """Read the timelines of all ranks by world, the earliest world first."""
    worlds: dict[str, list[list[PhaseTime]]] = {}
    for file in sorted((folder / "timelines").glob("*/rank-*.jsonl")):
        if phases := read_timeline(file):
            worlds.setdefault(file.parent.name, []).append(phases)
    return dict(sorted(worlds.items(), key=lambda item: min(rank[0].begin for rank in item[1])))


def _end_of(phases: list[PhaseTime]) -> float:
    return max((phase.end or phase.begin for phase in phases), default=0.0)


def write_page(report: SessionReport, folder: Path) -> Path:
    """Write the page of `report` into the session's folder."""
    environment = page_environment(_TEMPLATES)
    environment.filters["duration"] = format_duration
    page = environment.get_template("session.html.j2").render(
        report=report,
        outcomes=describe_outcomes(report),
        extent=describe_extent(report),
        phases=get_args(CyclePhase),
        longest=max((phase.end for case in report.cases for phase in case.phases), default=0.0)
        or 1.0,  # for a run that ended at once
    )
    return write_whole(folder / PAGE_FILE, page)


def describe_outcomes(report: SessionReport) -> str:
    """Count the outcomes, as in "1 FAIL, 7 PASS (2 left something unchecked) on cpu"."""
    counts = sorted(Counter(case.word for case in report.cases).items())
    unchecked = sum(case.outcome is Outcome.PASS and bool(case.reason) for case in report.cases)
    left = f" ({unchecked} left something unchecked)" if unchecked else ""
    words = ", ".join(f"{count} {outcome}" for outcome, count in counts)
    return f"{words}{left} on {report.device}"


def describe_extent(report: SessionReport) -> str:
    """Describe the size, as in "8 cases in 2 min 05 s, 362 of 575 pairs of values that can meet"."""
    number = len(report.cases)
    extent = f"{number} case{'' if number == 1 else 's'} in {format_duration(report.seconds)}"
    if not report.pairs_possible:  # the user named the cases, so there is no plan
        return extent
    pairs = f"{report.pairs_covered} of {report.pairs_possible}"
    return f"{extent}, {pairs} pairs of values that can meet"


def format_duration(seconds: float) -> str:
    """Format seconds, as in "0.4 s" or "2 min 05 s"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"
