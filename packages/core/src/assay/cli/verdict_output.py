"""The end of every command that returns a verdict: its faces and its exit code."""

from pathlib import Path

import typer


def finish(folder: Path, *, as_json: bool) -> None:
    """Show the run in `folder` and exit with its verdict's code."""
    from rich.console import Console

    from assay.report.publish import publish_one
    from assay.report.run_report import read_report
    from assay.report.terminal import print_report

    report = read_report(folder)
    print_report(report, Console(stderr=as_json), publish_one(report))
    if as_json:
        typer.echo(report.verdict.to_json())
    raise typer.Exit(report.verdict.verdict.exit_code)
