"""Options of commands that are written by hand."""

from typing import Annotated

import typer

AllowUnused = Annotated[
    list[str] | None,
    typer.Option(
        metavar="GLOB",
        help="Modules, parameters or experts that may stay uncompared: model.visual; repeatable.",
    ),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
]
