"""The command line: `assay`. Importing it imports no torch."""

import sys
from importlib.metadata import entry_points
from typing import NoReturn

import typer

from assay.cli import calibrate, capture, check, devices, explain, models, report
from assay.errors import AssayError

app = typer.Typer(
    name="assay",
    help="Does this model train and generate on this accelerator as it does on the reference?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(check.app, name="check")
app.command("capture")(capture.capture)
app.command("calibrate")(calibrate.calibrate)
app.command("devices")(devices.devices)
app.add_typer(models.app, name="models")
app.command("report")(report.report)
app.command("explain")(explain.explain)

# Commands of other packages: an entry point names a typer app.
COMMANDS = "assay.commands"


def main() -> NoReturn:
    """Run the command line and exit with its code."""
    for entry_point in entry_points(group=COMMANDS):
        app.add_typer(entry_point.load(), name=entry_point.name)
    try:
        app()
    except AssayError as error:
        print(f"assay: {error}", file=sys.stderr)  # noqa: T201 - the one message
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)
