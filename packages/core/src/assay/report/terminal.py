"""The terminal format of a report."""

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from assay.comparing.wording.phrases import (
    OUTCOME_SIGNS,
    describe_counts,
    describe_error,
    describe_judged,
    describe_level,
    describe_resolution,
    describe_suspect,
)
from assay.foreign_text import one_line
from assay.report.run_report import LadderRung, Report
from assay.verdicts import Outcome

# Colours that also differ in brightness, and that only add to the word.
_STYLES = {
    Outcome.PASS: "bold blue",
    Outcome.FAIL: "bold red",
    Outcome.NOT_COMPARED: "bold yellow",
}

# In columns; no row is as long.
_UNLIMITED = 100_000

_NUMBERS = ("compared", "ratio / limit")
_WORDS = ("level", "verdict")


def print_report(report: Report, console: Console, html: Path | None = None) -> None:
    """Print `report`: the verdict first, `html` (its page) last.

    Long lines that may be copied are left for the terminal to wrap. A file gets each row on one line.
    """
    if not console.is_terminal:
        console.width = _UNLIMITED
    for piece in _pieces(report, html):
        if isinstance(piece, Text):
            console.print(piece, soft_wrap=True)
        else:
            console.print(piece)


def print_index(reports: list[Report], console: Console, html: Path) -> None:
    """Print one line for each of several runs, and `html`, the page of all of them."""
    console.print(Text(describe_counts([report.verdict.verdict for report in reports])))
    table = _plain_table(*reports[0].index_cells)
    for report in reports:
        word, *cells = report.index_cells.values()
        table.add_row(Text(word, style=_STYLES[report.verdict.verdict]), *map(Text, cells))
    console.print(table)
    console.print(Text(f"report: {html}"), soft_wrap=True)


def _pieces(report: Report, html: Path | None) -> Iterator[RenderableType]:
    verdict, words = report.verdict, report.explanation
    yield _title(words.title, verdict.verdict)
    yield Text(words.headline)
    for detail in words.details:
        yield Text(f"  {detail}")
    if words.next_command:
        yield Text.assemble("Next: ", (words.next_command, "bold"))
    if verdict.verdict is not Outcome.PASS:
        yield Text("")
        yield Padding(_ladder(report.ladder), (0, 0, 0, 2), expand=False)
    if len(verdict.suspects) > 1:
        yield Text("")
        yield Text(
            f"Suspects, worst first ({len(report.top_suspects)} of {len(verdict.suspects)}):"
        )
        yield Padding(_suspects(report), (0, 0, 0, 2), expand=False)
    for note in report.notes:
        yield Text(f"note: {one_line(note)}")
    resolution = describe_resolution(verdict)
    if resolution and verdict.verdict is Outcome.FAIL:
        yield Text(resolution)
    if html:
        yield Text(f"report: {html}")


def _title(title: str, outcome: Outcome) -> Text:
    word, _, sides = title.partition(": ")
    return Text.assemble(f"{OUTCOME_SIGNS[outcome]} ", (word, _STYLES[outcome]), f": {sides}")


def _plain_table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        if column in _NUMBERS:
            table.add_column(column, no_wrap=True, justify="right")
        else:
            table.add_column(column, no_wrap=column in _WORDS, overflow="fold")
    return table


def _ladder(rungs: list[LadderRung]) -> Table:
    table = _plain_table("level", "verdict", "compared", "ratio / limit", "worst")
    for rung in rungs:
        level, row = rung.level, rung.worst
        judged = describe_judged(row.ratio, row.limit) if row and row.limit is not None else ""
        table.add_row(
            Text(one_line(rung.name)),
            Text(describe_level(level), style=_STYLES[level.verdict] if level.verdict else "dim"),
            f"{level.compared:,}" if level.compared else "",
            judged,
            Text(
                one_line(level.reason or (describe_error(row.statistic, row.actual) if row else ""))
            ),
        )
    return table


def _suspects(report: Report) -> Table:
    table = _plain_table("where", "what", "ratio / limit")
    for suspect in report.top_suspects:
        table.add_row(
            Text(describe_suspect(suspect, report.verdict.location)),
            Text(describe_error(suspect.statistic, suspect.error)),
            describe_judged(suspect.noise_ratio, suspect.limit),
        )
    return table
