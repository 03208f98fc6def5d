"""The Markdown format of a report, for job summaries of GitHub."""

import shlex
from collections.abc import Iterable

from assay.comparing.wording.phrases import (
    OUTCOME_SIGNS,
    describe_error,
    describe_judged,
    describe_level,
    describe_resolution,
    describe_suspect,
)
from assay.foreign_text import escape_markdown, markdown_block
from assay.report.run_report import Report
from assay.verdicts import Outcome


def render_markdown(report: Report) -> str:
    """A short summary of `report`."""
    verdict, words = report.verdict, report.explanation
    blocks = [
        f"## {OUTCOME_SIGNS[verdict.verdict]} {escape_markdown(words.title)}",
        markdown_block(words.message),
        _ladder(report),
    ]
    if len(verdict.suspects) > 1:
        blocks.append(_suspects(report))
    blocks += ["\n".join(f"- {escape_markdown(note)}" for note in report.notes)]
    resolution = describe_resolution(verdict)
    if resolution and verdict.verdict is Outcome.FAIL:
        blocks.append(escape_markdown(resolution))
    if verdict.command:
        blocks.append("To repeat it:\n\n" + markdown_block(shlex.join(verdict.command)))
    if report.facts and verdict.verdict is not Outcome.PASS:
        blocks.append(_facts(report))
    return "\n\n".join(block for block in blocks if block) + "\n"


def render_markdown_of(reports: list[Report]) -> str:
    """The summaries of all `reports`; of several, a table of them first."""
    texts = [render_markdown(report) for report in reports]
    if len(reports) > 1:
        rows = [report.index_cells for report in reports]
        lines = [
            _line(rows[0]),
            _line(["---"] * len(rows[0])),
            *(_line(row.values()) for row in rows),
        ]
        texts.insert(0, "\n".join(lines) + "\n")
    return "\n".join(texts)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(map(escape_markdown, cells))} |"


def _ladder(report: Report) -> str:
    lines = ["| level | verdict | compared | ratio / limit | worst |", "|---|---|--:|--:|---|"]
    for rung in report.ladder:
        level, row = rung.level, rung.worst
        judged = describe_judged(row.ratio, row.limit) if row and row.limit is not None else ""
        worst = describe_error(row.statistic, row.actual) if row else ""
        cells = [
            rung.name,
            describe_level(level),
            f"{level.compared:,}" if level.compared else "",
            judged,
            level.reason or worst,
        ]
        lines.append(_line(cells))
    return "\n".join(lines) if report.ladder else ""


def _suspects(report: Report) -> str:
    lines = ["| suspect | what | ratio / limit |", "|---|---|--:|"]
    for suspect in report.top_suspects:
        cells = [
            describe_suspect(suspect, report.verdict.location),
            describe_error(suspect.statistic, suspect.error),
            describe_judged(suspect.noise_ratio, suspect.limit),
        ]
        lines.append(_line(cells))
    left_out = len(report.verdict.suspects) - len(report.top_suspects)
    return "\n".join(lines) + (f"\n\n{left_out:,} more are in verdict.json." if left_out else "")


def _facts(report: Report) -> str:
    """Where it ran and with what, folded: what a repetition has to be the same in."""
    lines = ["<details><summary>Where it ran, and with what</summary>", "", "| | |", "|---|---|"]
    for group, facts in report.facts.items():
        lines += [
            f"| {escape_markdown(f'{group}: {name}')} | {escape_markdown(value)} |"
            for name, value in facts
        ]
    return "\n".join([*lines, "", "</details>"])
