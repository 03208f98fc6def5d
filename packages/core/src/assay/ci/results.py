"""What the commands of a job left: runs with verdicts, and their reports."""

from collections.abc import Iterable
from pathlib import Path

from assay.errors import AssayError
from assay.foreign_text import markdown_code
from assay.report.run_report import Report, read_report
from assay.runs.results import VERDICT_FILE, read_verdict
from assay.verdicts import Outcome


def find_runs(folder: Path) -> list[Path]:
    """Find the folders with a verdict at or below `folder`, without those inside another run."""
    return outermost(file.parent for file in sorted(folder.glob(f"**/{VERDICT_FILE}")))


def outermost(folders: Iterable[Path]) -> list[Path]:
    """Return the folders that are not inside another one."""
    known = list(folders)
    return [folder for folder in known if not any(other in folder.parents for other in known)]


def find_contradiction(run: Path) -> str:
    """Say why the verdict of a run contradicts the success of its command; "" if it does not."""
    try:
        outcome = read_verdict(run).verdict
    except AssayError as error:
        return f"{run.name} has no verdict that can be read: {str(error).splitlines()[0]}"
    return "" if outcome is Outcome.PASS else f"{run.name} says {outcome.value}"


def read_reports(runs: Iterable[Path]) -> tuple[list[Report], list[str]]:
    """Read the reports of runs, worst first. Returns: also a sentence for each unreadable run."""
    reports, unreadable = [], []
    for folder in runs:
        try:
            reports.append(read_report(folder))
        except AssayError as error:
            unreadable.append(f"{markdown_code(folder.name)}: {markdown_code(str(error))}")
    reports.sort(key=lambda report: -report.verdict.verdict.severity)
    return reports, unreadable
