"""The page of a session: every case with its verdict, its phases and how to repeat it."""

from pathlib import Path
from typing import get_args

from assay.files import write_whole
from assay.output.pages import page_environment
from assay_smoke.cases.timeline import CyclePhase
from assay_smoke.session.results import SessionReport
from assay_smoke.session.summary import duration, extent_in_words, outcomes_in_words

PAGE_FILE = "index.html"

_TEMPLATES = Path(__file__).with_name("templates")


def write_page(report: SessionReport, folder: Path) -> Path:
    """Write the page of `report` into the session's folder."""
    environment = page_environment(_TEMPLATES)
    environment.filters["duration"] = duration
    page = environment.get_template("session.html.j2").render(
        report=report,
        outcomes=outcomes_in_words(report),
        extent=extent_in_words(report),
        phases=get_args(CyclePhase),
        longest=max((phase.end for case in report.cases for phase in case.phases), default=0.0)
        or 1.0,  # of a run that ended in its first instant
    )
    return write_whole(folder / PAGE_FILE, page)
