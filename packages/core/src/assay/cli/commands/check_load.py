"""`assay check load`: is what is in memory what the files say?"""

from pathlib import Path
from typing import Annotated

import typer

from assay.cli import generation_options as options


def load(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder, hub name, or micro:RECIPE.")
    ],
    *,
    run: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="DEVICE/DTYPE; default: cpu, in the dtype of the files."),
    ] = None,
    trust_remote_code: options.TrustRemoteCode = False,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Default: runs/<time>-check-load.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the verdict as JSON and nothing else.")
    ] = False,
) -> None:
    """Is what is in memory, once MODEL is loaded, what its files say?

    Every tensor of the files is looked for in the loaded model, bitwise; whatever no file holds has
    to be the same when the model is loaded again; keys of config.json that no code reads are named;
    the tokenizer gives one BOS and tokenizes a chat once.

    Example: assay check load micro:llama --run cpu/bfloat16

    Exit code: 0 PASS, 1 FAIL, 2 usage or environment error, 3 not everything could be compared.
    """
    from assay.api.loading import check_load
    from assay.cli.verdict_output import end_with

    verdict = check_load(model, run=run, trust_remote_code=trust_remote_code, output=output)
    end_with(verdict, as_json=as_json)
