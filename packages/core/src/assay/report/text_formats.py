"""Reports as text: for the terminal, and as Markdown for job summaries of GitHub."""

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from assay.foreign_text import escape_markdown, markdown_block, one_line
from assay.judge.explain import describe_resolution
from assay.judge.wording import OUTCOME_SIGNS, SUSPECTS_ORDER, describe_counts
from assay.report.run_report import LONGEST_CELL, NUMERIC_COLUMNS, Report, list_runs
from assay.verdicts import Outcome, Verdict

# Colors that also differ in brightness, in addition to the word.
_STYLES = {Outcome.PASS: "bold blue", Outcome.FAIL: "bold red", Outcome.NOT_COMPARED: "bold yellow"}

# Number of columns, more than any row has.
_UNLIMITED = 100_000

_WORDS = ("level", "verdict")


def print_report(report: Report, console: Console, html: Path | None = None) -> None:
    """Print `report`, from the verdict to `html`, the path of its page, and last the next command.

    The terminal wraps long lines, so that they can be copied. A file gets each row on one line.
    """
    if not console.is_terminal:
        console.width = _UNLIMITED
    for piece in _pieces(report, html):
        if isinstance(piece, Text):
            console.print(piece, soft_wrap=True)
        else:
            console.print(piece)


def print_index(reports: list[Report], console: Console, html: Path) -> None:
    """Print a table of several runs, and `html`, the path of their index."""
    if not console.is_terminal:
        console.width = _UNLIMITED
    lines = list_runs(reports)
    console.print(Text(describe_counts([report.verdict.verdict for report in reports])))
    verdicts = [line.reports[0].verdict.verdict for line in lines]
    console.print(_table([line.cells for line in lines], verdicts))
    console.print(Text(f"report: {html}"), soft_wrap=True)


def _pieces(report: Report, html: Path | None) -> Iterator[RenderableType]:
    verdict, words = report.verdict, report.explanation
    yield _title(words.title, verdict.verdict)
    yield Text(words.headline)
    for detail in words.details:
        yield Text(f"  {detail}")
    if verdict.verdict is not Outcome.PASS and report.ladder:
        verdicts = [rung.level.verdict for rung in report.ladder]
        yield Text("")
        # The sentences above and the notes give the reasons.
        told = "\n".join([words.message, *map(one_line, report.notes)])
        untold = [
            rung
            for rung in report.ladder
            if not all(clause in told for clause in rung.reason.split("; "))
        ]
        short = [rung for rung in untold if len(rung.reason) <= LONGEST_CELL]
        cells = [
            rung.cells | ({} if rung in short else {"worst": rung.error}) for rung in report.ladder
        ]
        yield _indented(_table(cells, verdicts))
        for rung in untold:
            if rung not in short:
                yield Text(f"{rung.name}: {rung.reason}")
    yield from _broken_properties(verdict)
    if len(verdict.suspects) > 1:
        yield Text("")
        shown = f"{len(report.top_suspects)} of {len(verdict.suspects)}"
        yield Text(f"Suspects ({shown}), {SUSPECTS_ORDER}:")
        yield _indented(_table(report.suspect_cells(report.top_suspects)))
    for note in report.notes:
        yield Text(f"note: {one_line(note)}")
    resolution = describe_resolution(verdict, report.decided)
    if resolution and verdict.verdict is Outcome.FAIL:
        yield Text(resolution)
    if html:
        yield Text(f"report: {html}")
    if words.next_command:
        yield Text.assemble("Next: ", (words.next_command, "bold"))


def _broken_properties(verdict: Verdict) -> Iterator[Text]:
    """Yield each broken property of checked code, with its smallest case."""
    for name, level in verdict.levels.items():
        for subject in (level.model_extra or {}).get("subjects", ()):
            for finding in subject["findings"]:
                broken = f"broken in {finding['failed']} of {finding['cases']} cases"
                yield Text("")
                yield Text(one_line(f"{name}: {subject['subject']}"))
                yield Text(one_line(f"  must hold: {finding['name']}; {broken}"))
                for line in (*finding["reason"].splitlines(), *finding["example"]):
                    yield Text(f"    {one_line(line)}")


def _indented(table: Table) -> Padding:
    return Padding(table, (0, 0, 0, 2), expand=False)


def _title(title: str, outcome: Outcome) -> Text:
    word, _, sides = title.partition(": ")
    return Text.assemble(f"{OUTCOME_SIGNS[outcome]} ", (word, _STYLES[outcome]), f": {sides}")


def _table(lines: list[dict[str, str]], verdicts: Iterable[Outcome | None] = ()) -> Table:
    """Return lines of cells as a table, without empty columns. verdicts: of the lines, where they have one."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    columns = [name for name in lines[0] if any(line[name] for line in lines)]
    for column in columns:
        if column in NUMERIC_COLUMNS:
            table.add_column(column, no_wrap=True, justify="right")
        else:
            table.add_column(column, no_wrap=column in _WORDS, overflow="fold")
    for line, verdict in zip_longest(lines, verdicts):
        style = _STYLES[verdict] if verdict else "dim"
        table.add_row(*(Text(line[name], style if name == "verdict" else "") for name in columns))
    return table


def render_markdown(report: Report) -> str:
    """Return a short summary of `report`."""
    verdict, words = report.verdict, report.explanation
    blocks = [
        f"## {OUTCOME_SIGNS[verdict.verdict]} {verdict.verdict.value}: {escape_markdown(report.subject)}",
        markdown_block(words.message),
        markdown_table([rung.cells for rung in report.ladder]) if report.ladder else "",
    ]
    if len(verdict.suspects) > 1:
        blocks.append(_suspects(report))
    blocks += ["\n".join(f"- {escape_markdown(note)}" for note in report.notes)]
    resolution = describe_resolution(verdict, report.decided)
    if resolution and verdict.verdict is Outcome.FAIL:
        blocks.append(escape_markdown(resolution))
    if report.command:
        blocks.append("To repeat it:\n\n" + markdown_block(report.command))
    if report.facts and verdict.verdict is not Outcome.PASS:
        blocks.append(_facts(report))
    return "\n\n".join(block for block in blocks if block) + "\n"


def render_markdown_of(reports: list[Report], base: Path = Path()) -> str:
    """Return the summaries of `reports`. Several follow a table, and only the first failure of a line is unfolded.

    base: folders inside it are named relative to it.
    """
    if len(reports) == 1:
        return render_markdown(reports[0])
    lines = list_runs(reports, base)
    texts = [markdown_table([line.cells for line in lines]) + "\n"]
    for line in lines:
        for report in line.reports:
            text = render_markdown(report)
            is_first = report is line.reports[0]
            is_shown = is_first and report.verdict.verdict is not Outcome.PASS
            texts.append(text if is_shown else _fold(text))
    return "\n".join(texts)


def _fold(text: str) -> str:
    title, _, rest = text.removeprefix("## ").partition("\n")
    return f"<details><summary>{title}</summary>\n{rest}\n</details>\n"


def markdown_table(lines: list[dict[str, str]]) -> str:
    """Return lines of cells as a table; all have the columns of the first."""
    rules = ["--:" if column in NUMERIC_COLUMNS else "---" for column in lines[0]]
    rows = [_line(lines[0]), f"|{'|'.join(rules)}|", *(_line(line.values()) for line in lines)]
    return "\n".join(rows)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(map(escape_markdown, cells))} |"


def _suspects(report: Report) -> str:
    left_out = len(report.verdict.suspects) - len(report.top_suspects)
    table = f"Suspects, {SUSPECTS_ORDER}:\n\n"
    table += markdown_table(report.suspect_cells(report.top_suspects))
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
