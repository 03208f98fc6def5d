"""Prints the verdict on the data side: a table of subjects, then every broken property."""

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from assay.comparing.wording.phrases import OUTCOME_SIGNS
from assay.foreign_text import one_line
from assay.verdicts import Level, Outcome, Verdict
from assay_smoke.data.command.requests import NOT_ASKED_FOR
from assay_smoke.data.properties import SubjectReport

_STYLES = {
    Outcome.PASS: "bold blue",
    Outcome.FAIL: "bold red",
    Outcome.NOT_COMPARED: "bold yellow",
}


def print_data_verdict(verdict: Verdict, console: Console, file: Path) -> None:
    """Print `verdict`. file: where it was written."""
    outcome = verdict.verdict
    console.print(
        Text.assemble(
            f"{OUTCOME_SIGNS[outcome]} ",
            (outcome.value, _STYLES[outcome]),
            f": {verdict.compared:,} cases with {verdict.model['name']}",
        )
    )
    console.print(_table(verdict))
    others = [name for name, level in verdict.levels.items() if level.reason == NOT_ASKED_FOR]
    if others:
        console.print(Text(f"{NOT_ASKED_FOR}: {', '.join(others)}", style="dim"), soft_wrap=True)
    for line in _findings(verdict):
        console.print(Text(line), soft_wrap=True)
    for note in verdict.notes:
        console.print(Text(f"note: {one_line(note)}"), soft_wrap=True)
    console.print(Text(f"verdict: {file}"), soft_wrap=True)


def reports_of(level: Level) -> list[SubjectReport]:
    """Return the reports behind a level."""
    extra = level.model_extra or {}
    return [SubjectReport.model_validate(report) for report in extra.get("subjects", ())]


def _table(verdict: Verdict) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("level", no_wrap=True)
    table.add_column("subject", overflow="fold")
    table.add_column("cases", justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for name, level in verdict.levels.items():
        reports = reports_of(level)
        for report in reports:
            outcome = _outcome(report)
            cells = Text(one_line(report.subject)), f"{report.compared:,}"
            table.add_row(name, *cells, Text(outcome.value, style=_STYLES[outcome]))
        if not reports and level.reason != NOT_ASKED_FOR:
            table.add_row(name, Text(one_line(level.reason or ""), style="dim"), "", "not run")
    return table


def _outcome(report: SubjectReport) -> Outcome:
    if report.findings:
        return Outcome.FAIL
    return Outcome.NOT_COMPARED if report.untried or not report.compared else Outcome.PASS


def _findings(verdict: Verdict) -> Iterator[str]:
    for name, level in verdict.levels.items():
        for report in reports_of(level):
            for finding in report.findings:
                yield ""
                yield one_line(f"{name}: {report.subject}")
                yield one_line(
                    f"  broken in {finding.failed} of {finding.cases} cases: {finding.name}"
                )
                yield from (f"  {one_line(line)}" for line in finding.reason.splitlines())
                yield from (f"    {one_line(line)}" for line in finding.example)
        if level.verdict is Outcome.NOT_COMPARED:
            yield ""
            yield from (one_line(line) for line in f"{name}: {level.reason}".splitlines())
    if verdict.verdict is not Outcome.PASS:
        yield ""
