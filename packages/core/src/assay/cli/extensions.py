"""Commands of other packages: an entry point of the group `assay.commands` names a typer app."""

from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points

import typer

from assay.errors import MachineError

GROUP = "assay.commands"

# A command that fails to import accepts any arguments, including --help.
_TAKES_ALL = {
    "allow_extra_args": True, "allow_interspersed_args": False, "ignore_unknown_options": True,
    "help_option_names": list[str](),
}  # fmt: skip


def make_broken_extension_error(entry_point: EntryPoint, error: BaseException) -> MachineError:
    """Make the error from the exception of the import."""
    return MachineError(
        f"the command {entry_point.name} cannot be loaded: {entry_point.value} raised"
        f" {type(error).__name__}: {error}; repair or uninstall its package"
    )


def find_extensions() -> Iterable[EntryPoint]:
    """Return the entry points of all installed packages."""
    return entry_points(group=GROUP)


def add_extensions(app: typer.Typer, entry_points: Iterable[EntryPoint]) -> None:
    """Add the command of each entry point; a broken one raises when it is called."""
    for entry_point in entry_points:
        try:
            extension = _load(entry_point)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - code of others, imported
            _add_broken(app, entry_point, error)
        else:
            app.add_typer(extension, name=entry_point.name)


def _load(entry_point: EntryPoint) -> typer.Typer:
    extension = entry_point.load()
    if not isinstance(extension, typer.Typer):
        raise TypeError(f"{extension!r} is not a typer app")
    typer.main.get_command(extension)  # raises for parameters that typer cannot parse
    return extension


def _add_broken(app: typer.Typer, entry_point: EntryPoint, error: BaseException) -> None:
    @app.command(
        entry_point.name,
        help=f"Cannot be loaded: {type(error).__name__}.",
        context_settings=_TAKES_ALL,
    )
    def broken() -> None:
        raise make_broken_extension_error(entry_point, error)
