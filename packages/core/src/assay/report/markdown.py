"""The Markdown format of reports, for job summaries of GitHub."""

import shlex
from collections.abc import Iterable

from assay.comparing.explain import describe_resolution
from assay.comparing.wording import OUTCOME_SIGNS
from assay.foreign_text import escape_markdown, markdown_block
from assay.report.run_report import NUMERIC_COLUMNS, Report
from assay.verdicts import Outcome


def render_markdown(report: Report) -> str:
    """Return a short summary of `report`."""
    verdict, words = report.verdict, report.explanation
    blocks = [
        f"## {OUTCOME_SIGNS[verdict.verdict]} {escape_markdown(words.title)}",
        markdown_block(words.message),
        _table([rung.cells for rung in report.ladder]) if report.ladder else "",
    ]
    if len(verdict.suspects) > 1:
        blocks.append(_suspects(report))
    blocks += ["\n".join(f"- {escape_markdown(note)}" for note in report.notes)]
    resolution = describe_resolution(verdict, report.decided)
    if resolution and verdict.verdict is Outcome.FAIL:
        blocks.append(escape_markdown(resolution))
    if verdict.command:
        blocks.append("To repeat it:\n\n" + markdown_block(shlex.join(verdict.command)))
    if report.facts and verdict.verdict is not Outcome.PASS:
        blocks.append(_facts(report))
    return "\n\n".join(block for block in blocks if block) + "\n"


def render_markdown_of(reports: list[Report]) -> str:
    """Return the summaries of all `reports`, after a table of them if there are several."""
    texts = [render_markdown(report) for report in reports]
    if len(reports) > 1:
        texts.insert(0, _table([report.index_cells for report in reports]) + "\n")
    return "\n".join(texts)


def _table(lines: list[dict[str, str]]) -> str:
    """Return lines of cells as a table; all have the columns of the first."""
    rules = ["--:" if column in NUMERIC_COLUMNS else "---" for column in lines[0]]
    rows = [_line(lines[0]), f"|{'|'.join(rules)}|", *(_line(line.values()) for line in lines)]
    return "\n".join(rows)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(map(escape_markdown, cells))} |"


def _suspects(report: Report) -> str:
    left_out = len(report.verdict.suspects) - len(report.top_suspects)
    table = _table(report.suspect_cells(report.top_suspects))
    return table + (f"\n\n{left_out:,} more are in verdict.json." if left_out else "")


def _facts(report: Report) -> str:
    """Return where and with what the run was made, folded."""
    lines = ["<details><summary>Where it ran, and with what</summary>", "", "| | |", "|---|---|"]
    for group, facts in report.facts.items():
        lines += [
            f"| {escape_markdown(f'{group}: {name}')} | {escape_markdown(value)} |"
            for name, value in facts
        ]
    return "\n".join([*lines, "", "</details>"])
