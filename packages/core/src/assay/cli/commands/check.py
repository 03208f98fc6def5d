"""`assay check`: does a model compute here what it should?"""

import typer

from assay.api.generation import check_generate
from assay.api.loading import check_load
from assay.api.training import check_train
from assay.cli.derived_commands import derive_command

app = typer.Typer(help="Check a model against a reference.", no_args_is_help=True)

_EXIT_CODES = """
    Exit code: 0 PASS, 1 FAIL, 2 usage or environment error, 3 not everything could be compared.
"""
_GENERATE = f"""Does MODEL generate on the candidate as on the reference?

    Example: assay check generate micro:llama --reference cpu/float32 --candidate sim/bfloat16
{_EXIT_CODES}"""
_TRAIN = f"""Does MODEL train on the candidate as on the reference?

    Example: assay check train micro:llama --reference cpu/float32 --candidate cpu/bfloat16

    On ranks: assay check train micro:llama --reference cpu/float32 --candidate cpu/float32
    --candidate-trainer fsdp --mesh dp=2

    Overfit: assay check train micro:llama --reference cpu/float32 --candidate cpu/bfloat16
    --overfit --track tensorboard
{_EXIT_CODES}"""
_LOAD = f"""Does the loaded MODEL hold what its files say?

    Every tensor of the files must be in the loaded model, bit for bit. What no file holds must be
    equal after a second load. Keys of config.json that no code reads are named. The tokenizer
    must add one BOS and tokenize a chat once.

    Example: assay check load micro:llama --run cpu/bfloat16
{_EXIT_CODES}"""


@app.callback()
def _check() -> None:
    """Check a model against a reference."""


app.command("generate")(derive_command(check_generate, _GENERATE))
app.command("train")(derive_command(check_train, _TRAIN))
app.command("load")(derive_command(check_load, _LOAD))
