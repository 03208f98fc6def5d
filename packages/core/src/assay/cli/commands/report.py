"""`assay report`: redraw the reports of finished runs from their files."""

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
