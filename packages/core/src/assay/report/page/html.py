"""The HTML format: one file without references to others, and the files of runs."""

import base64
import hashlib
import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, Template
from markupsafe import Markup, escape

from assay.files import DiskError, write_whole
from assay.foreign_text import escape_controls
from assay.judge import wording as phrases
from assay.judge.explain import describe_resolution, over_limit
from assay.judge.wording import describe_counts, format_number
from assay.output.pages import page_environment
from assay.report.page.pictures import (
    MAX_CELLS,
    draw_curve,
    draw_depth,
    draw_heat_map,
    draw_kl,
    pack_data,
)
from assay.report.page.tables import MAX_ROWS, draw_ranks, draw_table, draw_tree, is_over_limit
from assay.report.run_report import NUMERIC_COLUMNS, Report, list_runs, shown_path
from assay.runs.folders import RunFolder
from assay.statistics import CURVES

REPORT_FILE = "report.html"
INDEX_FILE = "index.html"
MAX_PAGE_BYTES = 7_000_000
_FEWEST_ROWS = 100
MAX_SUSPECTS = 100
MAX_UNMATCHED = 200

Cells = Sequence[dict[str, str]]

_TEMPLATES = Path(__file__).with_name("templates")


def render_html(report: Report) -> str:
    """Render the page of `report`, of at most `MAX_PAGE_BYTES`.

    Long names can make a page larger than its number of cells and rows suggests. It is then drawn again
    with half of them, and reports how many it leaves out.
    """
    max_cells, max_rows = MAX_CELLS, MAX_ROWS
    while True:
        page = _render_report(report, max_cells, max_rows)
        if len(page.encode()) <= MAX_PAGE_BYTES or max_rows <= _FEWEST_ROWS:
            return page
        max_cells, max_rows = max_cells // 2, max_rows // 2


def render_first_screen(report: Report) -> str:
    """Render the start of the page, for display inside another page.

    It has neither pictures nor a script, and its style applies to no other part of that page.
    """
    return _render("first_screen.html.j2", report=report)


def render_index(
    reports: list[Report],
    link_of: dict[Path, str],
    base: Path = Path(),
    title: str = "",
    commands: Cells = (),
) -> str:
    """Render one page for several runs, in which folders inside `base` are relative to it.

    link_of: addresses of their pages, by folder.
    title: by default the counts of outcomes.
    commands: the cells of a table above that of the runs.
    """
    lines = list_runs(reports, base)
    ordered = [report for line in lines for report in line.reports]
    shown = {report.folder: shown_path(report.folder, base) for report in reports}
    title = title or describe_counts([report.verdict.verdict for report in ordered])
    return _render(
        "index.html.j2", title=title, commands=commands, lines=lines, reports=ordered,
        link_of=link_of, shown=shown,
    )  # fmt: skip


def render_page(template: Path, **context: object) -> str:
    """Render a template of another package, which extends `frame.html.j2`."""
    return _render(_environment().from_string(template.read_text(encoding="utf-8")), **context)


def _render_report(report: Report, max_cells: int, max_rows: int) -> str:
    heat_map, table = draw_heat_map(report, max_cells), draw_table(report, max_rows)
    depth, kl = draw_depth(report), draw_kl(report)
    curves = {name: curve for name in CURVES if (curve := draw_curve(report, name))}
    drawn = {name: curve.chart for name, curve in curves.items()} | {"depth": depth, "kl": kl}
    charts = {name: chart.points for name, chart in drawn.items() if chart}
    return _render(
        "report.html.j2",
        report=report,
        verdict=report.verdict,
        explanation=report.explanation,
        command=report.command,
        heat_map=heat_map,
        tree=draw_tree(report),
        ranks=draw_ranks(report),
        curves=curves,
        curve_titles=CURVES,
        depth=depth,
        kl=kl,
        table=table,
        data=pack_data(
            {
                "heatMap": heat_map.packed() if heat_map else None,
                "charts": charts,
                "table": table.packed(),
            }
        ),
        max_suspects=MAX_SUSPECTS,
        max_unmatched=MAX_UNMATCHED,
    )


@cache
def _environment() -> Environment:
    environment = page_environment(_TEMPLATES)
    environment.globals["phrases"] = phrases
    environment.globals["describe_resolution"] = describe_resolution
    environment.globals["numeric_columns"] = NUMERIC_COLUMNS
    environment.globals["is_over_limit"] = is_over_limit
    environment.globals["over_limit"] = over_limit
    environment.filters["number"] = format_number
    environment.filters["unbroken"] = _keep_numbers_whole
    environment.filters["with_code"] = _mark_code
    return environment


def _keep_numbers_whole(text: str) -> Markup:
    """Return HTML whose lines do not end after the minus of an exponent."""
    safe = str(escape(escape_controls(text)))
    return Markup(re.sub(r"[\d.]+e-\d+", r'<span class="whole">\g<0></span>', safe))  # noqa: S704


def _mark_code(text: str) -> Markup:
    """Return HTML with the parts between backticks as code."""
    safe = str(escape(escape_controls(text)))
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", safe))  # noqa: S704


def _render(template: str | Template, **context: object) -> str:
    # A page contains strings from the run, so its policy allows only this script, and no request.
    script = (_TEMPLATES / "report.js").read_text(encoding="utf-8")
    style = (_TEMPLATES / "report.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    return _environment().get_template(template).render(
        style=style,
        script=script,
        script_hash=digest,
        **context,
    )  # fmt: skip


def publish_one(report: Report, output: Path | None = None) -> Path:
    """Write the page of `report` to the new folder `output`, by default to the run's folder.

    Returns: the path of the page.
    Raises: FolderError if `output` is not empty, DiskError if it cannot be written.
    """
    folder = RunFolder.create("report", output).path if output else report.folder
    return write_whole(folder / REPORT_FILE, render_html(report))


def write_index(reports: list[Report], folder: Path, title: str = "", commands: Cells = ()) -> Path:
    """Write each run's page to its folder, and `render_index` to `folder`. Returns: its path."""
    link_of = {}
    for report in reports:
        page = publish_one(report)
        link_of[report.folder] = quote(Path(os.path.relpath(page, folder)).as_posix())
    worst_first = sorted(reports, key=lambda report: -report.verdict.verdict.severity)
    index = render_index(worst_first, link_of, folder, title, commands)
    return write_whole(folder / INDEX_FILE, index)


# GitHub rejects a job summary of more than 1 MiB.
_MAX_SUMMARY_BYTES = 1024 * 1024 - 1024


def append_summary(path: Path, text: str) -> None:
    """Append `text` to the job summary at `path`, up to GitHub's limit.

    Raises: DiskError if it cannot be written.
    """
    data = text.encode()
    try:
        with path.open("ab") as summary:
            left = max(_MAX_SUMMARY_BYTES - summary.tell(), 0)
            if len(data) > left:
                data = data[:left] + "\n\n… the rest is in the artifacts of the job.\n".encode()
            summary.write(data)
    except OSError as error:
        raise DiskError.refused(path, error) from error
