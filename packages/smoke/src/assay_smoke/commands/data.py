"""`assay smoke data`: do messages, batches, samplers and accumulation keep what training relies on?"""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from assay.output.streams import print_text

_OWN = "FILE.py:NAME"


def data(  # noqa: PLR0913 - one for each option
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Folder with a tokenizer, hub name, or micro:RECIPE: its chat template is checked.",
        ),
    ] = None,
    *,
    render: Annotated[
        str | None,
        typer.Option(metavar=_OWN, help="(tokenizer, messages, max_length) -> ids and labels."),
    ] = None,
    truncation: Annotated[
        Literal["keep-start", "keep-end", "drop"] | None,
        typer.Option(help="What is done with chats that are too long; default: any of these."),
    ] = None,
    collator: Annotated[
        str | None, typer.Option(metavar=_OWN, help="(tokenizer) -> collator that pads.")
    ] = None,
    packing: Annotated[
        str | None,
        typer.Option(metavar=_OWN, help="(tokenizer) -> collator that packs samples into rows."),
    ] = None,
    features: Annotated[
        Literal["masked", "plain"],
        typer.Option(help="Samples of collators: with masked labels, or with none."),
    ] = "masked",
    sampler: Annotated[
        str | None,
        typer.Option(metavar=_OWN, help="(plan, resumed) -> epochs of batches of sample numbers."),
    ] = None,
    batch_sampler: Annotated[
        str | None, typer.Option(metavar=_OWN, help="The same, with a budget of tokens a batch.")
    ] = None,
    accumulation: Annotated[
        str | None,
        typer.Option(
            metavar=_OWN,
            help="(model, micro_batches, num_step_tokens, num_ranks): backward passes.",
        ),
    ] = None,
    loader: Annotated[
        str | None,
        typer.Option(
            metavar=_OWN, help="(dataset, num_workers, rank) -> DataLoader, seeded by you."
        ),
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(metavar=_OWN, help="(samples) -> data set with random items.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Default: runs/<time>-smoke-data.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the verdict as JSON and nothing else.")
    ] = False,
) -> None:
    """Which property of your data side does not hold, and in which smallest case?

    Chats and their labels, collators, samplers over ranks and workers with resume, accumulation,
    random numbers of workers. Without MODEL and options the installed libraries' own are checked.

    Example: assay smoke data --collator my_library/collate.py:PadAndMask

    Exit code: 0 PASS, 1 FAIL, 2 usage or environment error, 3 not everything could be tried.
    """
    from assay.models.remote_code import remote_code_of
    from assay.output.console import open_console
    from assay.runs import RunFolder, open_progress
    from assay.runs.results import VERDICT_FILE, format_verdict
    from assay_smoke.data.command.check import check_data
    from assay_smoke.data.command.requests import DataRequest
    from assay_smoke.data.command.table import print_data_verdict

    request = DataRequest(
        model=model,
        render=render,
        collator=collator,
        packing=packing,
        sampler=sampler,
        batch_sampler=batch_sampler,
        accumulation=accumulation,
        loader=loader,
        dataset=dataset,
        truncation=truncation,
        features=features,
        remote_code=remote_code_of(trusted=trust_remote_code),
    )
    request.require_meaning()
    folder = RunFolder.create("smoke data", output)
    with open_progress() as progress:
        verdict = check_data(request, folder.path, progress)
    print_data_verdict(
        verdict, open_console(sys.stderr if as_json else None), folder.path / VERDICT_FILE
    )
    if as_json:
        print_text(format_verdict(verdict), end="")
    raise typer.Exit(verdict.verdict.exit_code)
