"""The `assay smoke` commands. Importing this package imports no torch."""

import typer

from assay_smoke.commands.data import data
from assay_smoke.commands.plan import plan
from assay_smoke.commands.run import run

app = typer.Typer(
    no_args_is_help=True, help="Train a few steps through setup, checkpoint, teardown and resume."
)
app.command()(plan)
app.command()(run)
app.command()(data)
