"""A session in two sentences and as an HTML page."""

from collections import Counter
from pathlib import Path
from typing import get_args

from assay.files import write_whole
from assay.output.pages import page_environment
from assay.verdicts import Outcome
from assay_smoke.cases.timeline import CyclePhase
from assay_smoke.session.results import SessionReport

PAGE_FILE = "index.html"

_TEMPLATES = Path(__file__).with_name("templates")


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
