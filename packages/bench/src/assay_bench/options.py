"""Options that several commands of `assay bench` share."""

from pathlib import Path
from typing import Annotated

import typer

Run = Annotated[str, typer.Option(metavar="RUN", help="Device and dtype: cpu/bfloat16.")]
Model = Annotated[str, typer.Option(metavar="MODEL", help="Folder, hub name, or micro:RECIPE.")]
Output = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Default: runs/<time>-bench-<command>.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")]
