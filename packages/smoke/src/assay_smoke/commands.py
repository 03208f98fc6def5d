"""`assay smoke`: does training survive set-up, checkpoint, tear-down and resume here?"""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True, help="Train a few steps through set-up, checkpoint, tear-down, resume."
)

_Run = Annotated[
    str, typer.Option(metavar="RUN", help="Where to train, as DEVICE/DTYPE: cpu/bfloat16.")
]
_Model = Annotated[str, typer.Option(metavar="MODEL", help="Folder, hub name, or micro:RECIPE.")]
_Trainer = Annotated[
    str | None,
    typer.Option(metavar="FILE.py:CLASS", help="A trainer of yours; default: the reference."),
]
_AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


@app.command()
def plan(
    *,
    run: _Run = "cpu/float32",
    model: _Model = "micro:llama",
    trainer: _Trainer = None,
    as_json: _AsJson = False,
) -> None:
    """Show what `assay smoke run` would do, without doing it."""
    from assay_smoke.planning import plan_smoke

    planned = plan_smoke(run, model, trainer)
    typer.echo(planned.model_dump_json(by_alias=True, indent=1) if as_json else planned.describe())


@app.command()
def run(
    *,
    run: _Run = "cpu/float32",
    model: _Model = "micro:llama",
    trainer: _Trainer = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Default: runs/<time>-smoke-run.")
    ] = None,
    as_json: _AsJson = False,
) -> None:
    """Does a resumed run go on exactly where the uninterrupted one was?

    Example: assay smoke run --run cpu/float32

    Exit code: 0 PASS, 1 FAIL, 2 usage or environment error.
    """
    from assay.cli.verdict_output import finish
    from assay.runs import RunFolder, open_progress
    from assay_smoke.cycle import run_cycle
    from assay_smoke.planning import plan_smoke

    (cycle,) = plan_smoke(run, model, trainer).cycles
    folder = RunFolder.create("smoke run", output)
    with open_progress() as progress:
        run_cycle(cycle, folder.path, progress)
    finish(folder.path, as_json=as_json)
