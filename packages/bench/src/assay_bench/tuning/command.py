"""`assay bench tune`: what does a model become when it is trained here?"""

from pathlib import Path
from typing import Annotated

import typer

from assay_bench.options import AsJson


def tune(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE.toml", help="A recipe, or one that ships: micro.")
    ],
    *,
    run: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="DEVICE/DTYPE that trains, in place of the recipe's."),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Output of an earlier one, with several seeds."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Default: runs/<time>-bench-tune. One that was interrupted goes on in its folder.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Does a model learn a known text, and do its losses run as those of a baseline?

    Leaves for each model, permutation and seed a Hugging Face folder, its losses and their record.

    Example: assay bench tune micro --output runs/tuned

    Example: assay bench tune micro --run cuda/float32

    Exit code: 0 PASS, 1 FAIL, 2 usage or environment error, 3 the baseline has nothing alike.
    """
    from assay.cli.verdict_output import finish
    from assay.runs import open_progress
    from assay_bench.tuning.recipe import read_recipe
    from assay_bench.tuning.running import open_folder, run_tunings

    asked = read_recipe(recipe, run)
    folder = open_folder(asked, output)
    with open_progress() as progress:
        run_tunings(asked, folder, baseline, progress)
    finish(folder, as_json=as_json)
