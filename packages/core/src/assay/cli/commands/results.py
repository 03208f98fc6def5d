"""`assay report` and `assay explain`: the commands on the results of finished runs."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from assay.api.options import Option
from assay.cli.derived_commands import with_options
from assay.output.streams import print_text


@with_options
def report(
    folders: Annotated[list[Path], Option("Folders of finished runs.", "DIR...")],
    *,
    output: Annotated[
        Path | None,
        Option(
            "Folder for the page. Default: DIR itself; for several, runs/<time>-report. "
            "A non-empty folder is refused."
        ),
    ] = None,
    markdown: Annotated[
        Path | None, Option("Append a Markdown summary to this file, as for a job summary.")
    ] = None,
    as_json: Annotated[
        bool, Option("Print the verdict, or a list of them, and nothing else.")
    ] = False,
) -> None:
    """Draw the report of finished runs again; several runs get an index in one file.

    The exit code is that of the worst verdict.
    """
    from assay.output.console import open_console
    from assay.report.markdown import render_markdown_of
    from assay.report.publish import append_summary, publish_one, publish_several
    from assay.report.run_report import read_report
    from assay.report.terminal import print_index, print_report
    from assay.runs.results import format_verdict
    from assay.verdicts import overall_outcome

    reports = [read_report(folder) for folder in folders]
    console = open_console(sys.stderr if as_json else None)
    if len(reports) == 1:
        print_report(reports[0], console, publish_one(reports[0], output))
    else:
        print_index(reports, console, publish_several(reports, output))
    if markdown is not None:
        append_summary(markdown, render_markdown_of(reports))
    if as_json:
        texts = [format_verdict(each.verdict).rstrip() for each in reports]
        print_text(texts[0] if len(texts) == 1 else f"[{','.join(texts)}]")
    raise typer.Exit(overall_outcome([each.verdict.verdict for each in reports]).exit_code)


@with_options
def explain(
    diagnosis: Annotated[
        str | None, Option("A diagnosis of verdict.json; without it, all are listed.")
    ] = None,
) -> None:
    """Say what a diagnosis means, what usually causes it, and what to do next."""
    from rich.text import Text

    from assay.comparing.wording import describe_diagnosis, list_diagnoses
    from assay.output.console import new_table, open_console

    console = open_console()
    if diagnosis is not None:
        console.print(Text(describe_diagnosis(diagnosis)))
        return
    table = new_table()
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, verdict, summary in list_diagnoses():
        table.add_row(name, verdict, summary)
    console.print(table)
