"""The command `assay bench tune`."""

from pathlib import Path
from typing import Annotated

import typer

from assay_bench.options import AsJson


def tune(
    recipe: Annotated[
        str,
        typer.Argument(metavar="RECIPE.toml", help="A recipe file, or the shipped recipe: micro."),
    ],
    *,
    run: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Device and dtype. Default: from the recipe."),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Output of an earlier run with several seeds."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Default: runs/<time>-bench-tune. An interrupted run continues in its folder.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train models on a known text, and check what they learned and how their losses compare.

    Writes a Hugging Face folder, losses and a record for each model, permutation and seed.

    Example: assay bench tune micro --output runs/tuned

    Example: assay bench tune micro --run cuda/float32

    Exit code: 0 PASS, 1 FAIL, 2 usage or environment error, 3 the baseline has no
    matching run.
    """
    from assay.cli.verdict_output import finish
    from assay.runs import open_progress
    from assay_bench.tuning.recipe import read_recipe
    from assay_bench.tuning.running import open_folder, run_tunings

    recipe_file = read_recipe(recipe, run)
    folder = open_folder(recipe_file, output)
    with open_progress() as progress:
        run_tunings(recipe_file, folder, baseline, progress)
    finish(folder, as_json=as_json)
