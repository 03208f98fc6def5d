"""The command line: `assay`. Importing it imports no torch."""

import sys
import traceback
from importlib.metadata import entry_points, version
from typing import Annotated, NoReturn

import typer

from assay.cli import extensions
from assay.cli.commands import calibrate, capture, check, devices, explain, models, report
from assay.errors import AssayError

app = typer.Typer(
    name="assay",
    help="Does this model train and generate on this accelerator as it does on the reference?",
    no_args_is_help=True,
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


def _print_version(asked: bool) -> None:  # noqa: FBT001 - typer's callback
    if asked:
        typer.echo(f"assay {version('assay-core')}")
        raise typer.Exit


@app.callback()
def _assay(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version of assay."
        ),
    ] = False,
) -> None:
    """Only for --version."""


_BUG = "assay: this is a bug in assay, and no verdict: please report it with the lines above"


def main() -> NoReturn:
    """Run the command line and exit with its code."""
    extensions.add_extensions(app, entry_points(group=extensions.GROUP))
    try:
        app(prog_name="assay")  # for shell completion also as python -m assay.cli
    except AssayError as error:
        print(f"assay: {error}", file=sys.stderr)  # noqa: T201 - the one message
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except SystemExit as end:
        # typer ends with 1, which is a verdict, where nobody reads the output any more.
        sys.exit(2 if isinstance(end.__context__, OSError) else end.code)
    except Exception:  # noqa: BLE001 - Python would end with 1, which is a verdict
        traceback.print_exc()
        print(_BUG, file=sys.stderr)  # noqa: T201 - the one message
        sys.exit(2)
    sys.exit(0)
