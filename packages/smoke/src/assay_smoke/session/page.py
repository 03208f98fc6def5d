"""The page of a session: every case with its verdict, its phases and how to repeat it."""

from collections import Counter
from pathlib import Path
from typing import get_args

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from assay.runs.folders import write_whole
from assay_smoke.cases.timeline import CyclePhase
from assay_smoke.session.results import SessionReport

PAGE_FILE = "index.html"

_TEMPLATES = Path(__file__).with_name("templates")


def write_page(report: SessionReport, folder: Path) -> Path:
    """Write the page of `report` into the session's folder."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined
    )
    environment.filters["duration"] = duration
    counts = Counter(case.outcome.value for case in report.cases)
    page = environment.get_template("session.html.j2").render(
        report=report,
        counts=dict(sorted(counts.items())),
        phases=get_args(CyclePhase),
        longest=max((phase.end for case in report.cases for phase in case.phases), default=1.0),
    )
    return write_whole(folder / PAGE_FILE, page)


def duration(seconds: float) -> str:
    """As in "0.4 s" or "2 min 05 s"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"
