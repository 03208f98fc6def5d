"""`assay models`: list and rebuild the micro models of the package."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from assay.api.options import Option
from assay.cli.derived_commands import with_options
from assay.output.streams import print_text

app = typer.Typer(no_args_is_help=True, help="List the micro models, or train one again.")

_STEPS_BETWEEN_NOTES = 100


@app.command("list")
@with_options
def list_models(
    *,
    as_json: Annotated[bool, Option("Print one JSON object and nothing else.")] = False,
) -> None:
    """Show the recipes: what each is for, its size and its loss on held-out text."""
    from assay.models import RECIPES
    from assay.models.micro.recipes import read_provenance
    from assay.output.console import new_table, open_console

    records = {name: read_provenance(recipe) for name, recipe in RECIPES.items()}
    if as_json:
        print_text(json.dumps({"schema": 1, "models": records}, indent=1))
        return
    table = new_table("MODEL", "PARAMETERS", "HELD-OUT LOSS", "WHAT IT HAS")
    for name, recipe in RECIPES.items():
        table.add_row(f"micro:{name}", *_size_and_loss(records[name]), recipe.summary)
    open_console().print(table)


@app.command("build")
@with_options
def build(
    recipe: Annotated[str, Option("A recipe of `assay models list`.")],
    *,
    output: Annotated[
        Path | None, Option("Folder for the model; by default ./micro-RECIPE.")
    ] = None,
    seed: Annotated[int, Option("Of the first weights and of the text's order.")] = 0,
    threads: Annotated[int, Option("A part of what the weights depend on.", minimum=1)] = 2,
) -> None:
    """Train a micro model from the standard library's own text, and print its held-out loss.

    The result is a Hugging Face folder that every command takes as MODEL.
    """
    from assay.models.micro.recipes import find_recipe
    from assay.runs import open_progress

    steps = find_recipe(recipe).steps
    with (
        open_progress() as progress,
        progress.task(f"train micro:{recipe}", steps, "steps") as task,
    ):
        from assay.models.micro_training import build_model

        def show(step: int, num_steps: int, loss: float) -> None:
            task.advance()
            if step % _STEPS_BETWEEN_NOTES == 0 or step == num_steps:
                progress.note(f"step {step} of {num_steps}: training loss {loss:.3f}")

        report = build_model(
            recipe, output or Path(f"micro-{recipe}"), show, seed=seed, num_threads=threads
        )
    print_text(
        f"{report.folder}: {report.num_parameters:,} parameters, held-out loss"
        f" {report.held_out_loss:.3f} {report.loss_unit} ({report.held_out_loss_long:.3f} at 1,088"
        f" tokens), {report.seconds:.0f} s"
    )


def _size_and_loss(record: dict[str, Any] | None) -> tuple[str, str]:
    if record is None:
        return "?", "not installed"
    return f"{record['num_parameters']:,}", f"{record['held_out_loss']:.3f} {record['loss_unit']}"
