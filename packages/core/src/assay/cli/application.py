"""All commands: those of assay, and those of other packages under the entry points `assay.commands`.

Importing this module imports no torch.
"""

from importlib.metadata import EntryPoint, entry_points, version
from typing import Annotated

import typer

from assay.cli.commands import calibrate, capture, check, devices, dumps, models, results
from assay.errors import MachineError
from assay.output.streams import print_text

GROUP = "assay.commands"

# A command that fails to import accepts any arguments, including --help.
_TAKES_ALL = {
    "allow_extra_args": True, "allow_interspersed_args": False, "ignore_unknown_options": True,
    "help_option_names": list[str](),
}  # fmt: skip


app = typer.Typer(
    name="assay",
    help="Does this model train and generate on this accelerator as it does on the reference?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(check.app, name="check")
app.command("capture", cls=capture.CaptureCommand)(capture.capture)
app.command("compare")(dumps.compare)
app.command("inspect")(dumps.inspect)
app.command("calibrate")(calibrate.calibrate)
app.command("devices")(devices.devices)
app.add_typer(models.app, name="models")
app.command("report")(results.report)
app.command("explain")(results.explain)


def add_extensions() -> None:
    """Add the commands of other packages; a broken one raises when it is called."""
    for entry_point in entry_points(group=GROUP):
        try:
            extension = entry_point.load()
            if not isinstance(extension, typer.Typer):
                raise TypeError(f"{extension!r} is not a typer app")  # noqa: TRY301
            typer.main.get_command(extension)  # raises for parameters that typer cannot parse
        except (Exception, SystemExit) as error:  # noqa: BLE001 - code of others, imported
            _add_broken(entry_point, error)
        else:
            app.add_typer(extension, name=entry_point.name)


def _add_broken(entry_point: EntryPoint, error: BaseException) -> None:
    @app.command(
        entry_point.name,
        help=f"Cannot be loaded: {type(error).__name__}.",
        context_settings=_TAKES_ALL,
    )
    def broken() -> None:
        raise MachineError(
            f"the command {entry_point.name} cannot be loaded: {entry_point.value} raised"
            f" {type(error).__name__}: {error}; repair or uninstall its package"
        )


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
