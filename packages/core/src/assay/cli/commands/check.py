"""`assay check`: is it right here?"""

from pathlib import Path
from typing import Annotated

import typer

from assay.cli import generation_options as options
from assay.cli.commands.check_load import load
from assay.cli.commands.check_train import train
from assay.sites import CheckLevel

app = typer.Typer(help="Check a model against a reference.", no_args_is_help=True)


@app.callback()
def _check() -> None:
    """Check a model against a reference."""


@app.command()
def generate(  # noqa: PLR0913 - one for each option
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder, hub name, or micro:RECIPE.")
    ],
    *,
    candidate: Annotated[
        str, typer.Option(metavar="RUN", help="What is judged, as DEVICE/DTYPE: sim/bfloat16.")
    ],
    reference: Annotated[
        str | None, typer.Option(metavar="RUN", help="The trusted device: cpu/float32.")
    ] = None,
    golden: Annotated[
        Path | None,
        typer.Option(metavar="TRACE", help="A golden captured elsewhere, instead of --reference."),
    ] = None,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not compare the golden with its hashes.")
    ] = False,
    candidate_setup: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FUNC", help="Called with the candidate's model before it runs."
        ),
    ] = None,
    candidate_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="threads=N, attention=NAME, experts=NAME, batch-size=1, compile=1, padding=left;"
            " repeatable.",
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="tp=N", help="Divide the candidate's heads, features, vocabulary over N ranks."
        ),
    ] = None,
    prompts: options.Prompts = None,
    prompt_length: options.PromptLength = None,
    batch_size: options.BatchSize = None,
    max_new_tokens: options.MaxNewTokens = None,
    chat: options.Chat = False,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    generation_config: options.GenerationConfigFile = None,
    level: Annotated[
        CheckLevel, typer.Option(help="auto runs all levels; others stop early and see less.")
    ] = "auto",
    limits: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="Limits of the noise ratios.")
    ] = "noise",
    allow_unused: options.AllowUnused = None,
    seed: options.Seed = None,
    trust_remote_code: options.TrustRemoteCode = False,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Default: runs/<time>-check-generate.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the verdict as JSON and nothing else.")
    ] = False,
) -> None:
    """Does MODEL generate on the candidate as on the reference?

    Example: assay check generate micro:llama --reference cpu/float32 --candidate sim/bfloat16

    Exit code: 0 PASS, 1 FAIL, 2 usage or environment error, 3 not everything could be compared.
    """
    from assay.api.generation import check_generate
    from assay.cli.verdict_output import end_with

    verdict = check_generate(
        model,
        candidate=candidate,
        reference=reference,
        golden=golden,
        no_verify=no_verify,
        candidate_setup=candidate_setup,
        candidate_option=_pairs(candidate_option or []),
        mesh=mesh,
        prompts=prompts,
        prompt_length=prompt_length,
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        chat=chat,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        generation_config=generation_config,
        level=level,
        limits=limits,
        allow_unused=allow_unused,
        seed=seed,
        trust_remote_code=trust_remote_code,
        output=output,
    )
    end_with(verdict, as_json=as_json)


app.command()(train)
app.command()(load)


def _pairs(texts: list[str]) -> dict[str, str]:
    from assay.errors import UsageError

    pairs = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator:
            raise UsageError(f"candidate option {text!r} is not of the form NAME=VALUE")
        pairs[name] = value
    return pairs
