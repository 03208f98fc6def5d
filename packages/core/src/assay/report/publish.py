"""Files of HTML reports, and the job summary."""

import os
from pathlib import Path
from urllib.parse import quote

from assay.files import DiskError, write_whole
from assay.report.page.html import INDEX_FILE, REPORT_FILE, render_html, render_index
from assay.report.run_report import Report
from assay.runs.folders import RunFolder
from assay.verdicts import Outcome

_WORST_FIRST = (Outcome.FAIL, Outcome.NOT_COMPARED, Outcome.PASS)


def publish_one(report: Report, output: Path | None = None) -> Path:
    """Write the page of `report` to the new folder `output`, by default to the run's folder.

    Returns: the path of the page.
    Raises: FolderError if `output` is not empty, DiskError if it cannot be written.
    """
    folder = RunFolder.create("report", output).path if output else report.folder
    return write_whole(folder / REPORT_FILE, render_html(report))


def publish_several(reports: list[Report], output: Path | None = None) -> Path:
    """Write each run's page to its folder, and an index of all to the new folder `output`.

    Returns: the path of the index.
    Raises: FolderError if `output` is not empty, DiskError if it cannot be written.
    """
    folder = RunFolder.create("report", output)
    link_of = {}
    for report in reports:
        page = publish_one(report)
        link_of[report.folder] = quote(Path(os.path.relpath(page, folder.path)).as_posix())
    worst_first = sorted(reports, key=lambda report: _WORST_FIRST.index(report.verdict.verdict))
    return folder.write_text(INDEX_FILE, render_index(worst_first, link_of))


def append_summary(path: Path, text: str) -> None:
    """Append `text` to the job summary at `path`.

    Raises: DiskError if it cannot be written.
    """
    try:
        with path.open("a", encoding="utf-8") as summary:
            summary.write(text)
    except OSError as error:
        raise DiskError.refused(path, error) from error
