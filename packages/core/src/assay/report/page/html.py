"""The HTML format: one file without references to others."""

import base64
import hashlib
import shlex
from functools import cache
from pathlib import Path

from jinja2 import Environment, Template

from assay.comparing import wording as phrases
from assay.comparing.explain import describe_resolution, over_limit
from assay.comparing.wording import format_number
from assay.output.pages import page_environment
from assay.report.page.charts import draw_depth, draw_kl, draw_losses
from assay.report.page.heatmap import MAX_CELLS, draw_heat_map
from assay.report.page.packing import pack_data
from assay.report.page.table import MAX_ROWS, draw_table
from assay.report.page.worst_places import draw_ranks, draw_tree, is_over_limit
from assay.report.run_report import NUMERIC_COLUMNS, Report

REPORT_FILE = "report.html"
INDEX_FILE = "index.html"
MAX_PAGE_BYTES = 7_000_000
_FEWEST_ROWS = 100
MAX_SUSPECTS = 100
MAX_UNMATCHED = 200

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


def render_index(reports: list[Report], link_of: dict[Path, str]) -> str:
    """Render one page for several runs. link_of: addresses of their pages, by folder."""
    return _render("index.html.j2", reports=reports, link_of=link_of)


def render_page(template: Path, **context: object) -> str:
    """Render a template of another package, which extends `frame.html.j2`."""
    return _render(_environment().from_string(template.read_text(encoding="utf-8")), **context)


def _render_report(report: Report, max_cells: int, max_rows: int) -> str:
    heat_map, table = draw_heat_map(report, max_cells), draw_table(report, max_rows)
    depth, kl = draw_depth(report), draw_kl(report)
    losses = draw_losses(report)
    drawn = {"losses": losses, "depth": depth, "kl": kl}
    charts = {name: chart.points for name, chart in drawn.items() if chart}
    return _render(
        "report.html.j2",
        report=report,
        verdict=report.verdict,
        explanation=report.explanation,
        command=shlex.join(report.verdict.command),
        heat_map=heat_map,
        tree=draw_tree(report),
        ranks=draw_ranks(report),
        **drawn,
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
    return environment


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
