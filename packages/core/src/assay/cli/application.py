"""All commands. Importing them imports no torch."""

from importlib.metadata import version
from typing import Annotated

import typer

from assay.cli.commands import (
    calibrate,
    capture,
    check,
    compare,
    devices,
    explain,
    inspect,
    models,
    report,
)
from assay.output.streams import print_text

app = typer.Typer(
    name="assay",
    help="Does this model train and generate on this accelerator as it does on the reference?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(check.app, name="check")
app.command("capture", cls=capture.CaptureCommand)(capture.capture)
app.command("compare")(compare.compare)
app.command("inspect")(inspect.inspect)
app.command("calibrate")(calibrate.calibrate)
app.command("devices")(devices.devices)
app.add_typer(models.app, name="models")
app.command("report")(report.report)
app.command("explain")(explain.explain)


def _print_version(asked: bool) -> None:  # noqa: FBT001 - typer's callback
    if asked:
        print_text(f"assay {version('assay-core')}")
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
    """Add --version."""
