"""Print a verdict, and exit with its code."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from assay.errors import MachineError
from assay.output.streams import print_error, print_text

if TYPE_CHECKING:
    from assay.api.verdict import CheckedVerdict


def finish(folder: Path, *, as_json: bool) -> None:
    """Write the page of the run in `folder`, show it, and exit with its verdict's code."""
    from assay.api.verdict import CheckedVerdict

    end_with(CheckedVerdict.publish(folder), as_json=as_json)


def end_with(verdict: "CheckedVerdict", *, as_json: bool) -> None:
    """Print `verdict` and exit with its code; under torchrun only rank 0 prints."""
    from assay.launch import is_first_rank
    from assay.output.console import open_console
    from assay.runs.results import format_verdict

    if not is_first_rank():
        raise typer.Exit
    verdict.print_to(open_console(sys.stderr if as_json else None))
    if as_json:
        print_text(format_verdict(verdict), end="")
    if verdict.unwritten:
        print_error(f"assay: {verdict.unwritten}")
        raise typer.Exit(MachineError.exit_code)
    raise typer.Exit(verdict.verdict.exit_code)
