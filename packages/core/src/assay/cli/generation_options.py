"""An option that `assay expect` shares with `assay check`."""

from typing import Annotated

import typer

AllowUnused = Annotated[
    list[str] | None,
    typer.Option(
        metavar="GLOB",
        help="Modules, parameters or experts that may stay uncompared: model.visual; repeatable.",
    ),
]
