"""`assay check`: is it right here?"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from assay.cli.commands.check_train import train
from assay.cli.options import generation as options

app = typer.Typer(help="Check a model against a reference.", no_args_is_help=True)


class CheckLevel(StrEnum):
    """How deep a check goes."""

    AUTO = "auto"
    TOKENS = "tokens"
    LOGITS = "logits"
    MODULES = "modules"


@app.callback()
def _check() -> None:
    """Check a model against a reference."""


@app.command()
def generate(  # noqa: PLR0913 - one for each option
    context: typer.Context,
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
            help="threads=N, attention=NAME, experts=NAME, batch-size=1, compile=1; repeatable.",
        ),
    ] = None,
    prompts: options.Prompts = None,
    prompt_length: options.PromptLength = None,
    batch_size: options.BatchSize = 4,
    max_new_tokens: options.MaxNewTokens = 32,
    chat: options.Chat = False,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    generation_config: options.GenerationConfigFile = None,
    level: Annotated[
        CheckLevel, typer.Option(help="auto runs all levels; others stop early and see less.")
    ] = CheckLevel.AUTO,
    limits: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="Limits of the noise ratios.")
    ] = "noise",
    seed: options.Seed = 0,
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
    from assay.cli.verdict_output import finish
    from assay.errors import UsageError
    from assay.generate.processes.check import check_generate
    from assay.generate.processes.requests import GenerateCheck, InputOptions
    from assay.runs import RunFolder, open_progress

    if (reference is None) == (golden is None):
        raise UsageError("give either --reference RUN or --golden TRACE")
    inputs = InputOptions(
        prompts=prompts,
        prompt_length=prompt_length,
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        chat=chat,
        seed=seed,
        sampling=options.sampling_options(temperature, top_p, top_k, generation_config),
    )
    check = GenerateCheck(
        model=model,
        candidate=candidate,
        reference=reference,
        golden=golden,
        inputs=inputs,
        given=options.given_options(context),
        level="modules" if level is CheckLevel.AUTO else level.value,  # type: ignore[arg-type]
        setup=candidate_setup,
        options=_pairs(candidate_option or []),
        limits=limits,
        remote_code="trust" if trust_remote_code else "refuse",
    )
    folder = RunFolder.create("check generate", output)
    with open_progress() as progress:
        check_generate(check, folder.path, progress)
    finish(folder.path, as_json=as_json)


app.command()(train)


def _pairs(texts: list[str]) -> dict[str, str]:
    from assay.errors import UsageError

    pairs = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator:
            raise UsageError(f"candidate option {text!r} is not of the form NAME=VALUE")
        pairs[name] = value
    return pairs
