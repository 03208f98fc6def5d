"""The end of every command that returns a verdict: its faces and its exit code."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from assay.errors import MachineError

if TYPE_CHECKING:
    from assay.api.verdict import CheckedVerdict


def finish(folder: Path, *, as_json: bool) -> None:
    """Write the page of the run in `folder`, show it, and exit with its verdict's code."""
    from assay.api.verdict import CheckedVerdict

    end_with(CheckedVerdict.publish(folder), as_json=as_json)


def end_with(verdict: "CheckedVerdict", *, as_json: bool) -> None:
    """Show `verdict` and exit with its code."""
    from rich.console import Console

    verdict.print_to(Console(stderr=as_json))
    if as_json:
        typer.echo(verdict.to_json())
    if verdict.unwritten:
        typer.echo(f"assay: {verdict.unwritten}", err=True)
        raise typer.Exit(MachineError.exit_code)
    raise typer.Exit(verdict.verdict.exit_code)
