"""`assay smoke data`: checks chats, labels, batches, samplers, accumulation and workers."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from assay.api.options import Option
from assay.cli.derived_commands import with_options
from assay.output.streams import print_text
from assay_smoke.data.protocols import FeatureKind, Truncation

_OWN = "FILE.py:NAME"


@with_options
def data(  # noqa: PLR0913 - one for each option
    model: Annotated[
        str | None,
        Option(
            "Check the chat template of a folder with a tokenizer, hub name or micro:RECIPE.",
            "[MODEL]",
        ),
    ] = None,
    *,
    render: Annotated[
        str | None, Option("(tokenizer, messages, max_length) -> ids and labels.", _OWN)
    ] = None,
    truncation: Annotated[
        Truncation | None,
        Option("Declare how long chats are cut. Default: any of these ways passes."),
    ] = None,
    collator: Annotated[str | None, Option("(tokenizer) -> collator that pads.", _OWN)] = None,
    packing: Annotated[
        str | None, Option("(tokenizer) -> collator that packs samples into rows.", _OWN)
    ] = None,
    features: Annotated[
        FeatureKind, Option("Samples for collators: with masked labels, or without labels.")
    ] = "masked",
    sampler: Annotated[
        str | None, Option("(plan, resumed) -> epochs of batches of sample numbers.", _OWN)
    ] = None,
    batch_sampler: Annotated[
        str | None, Option("The same with a token budget per batch.", _OWN)
    ] = None,
    accumulation: Annotated[
        str | None,
        Option("(model, micro_batches, num_step_tokens, num_ranks): runs backward passes.", _OWN),
    ] = None,
    loader: Annotated[
        str | None, Option("(dataset, num_workers, rank) -> DataLoader with your seeding.", _OWN)
    ] = None,
    dataset: Annotated[str | None, Option("(samples) -> dataset with random items.", _OWN)] = None,
    trust_remote_code: Annotated[bool, Option("Run code from the model's repository.")] = False,
    output: Annotated[Path | None, Option("Default: runs/<time>-smoke-data.", "DIR")] = None,
    as_json: Annotated[bool, Option("Print the verdict as JSON and nothing else.")] = False,
) -> None:
    """Find broken properties of a training run's data side, each with its smallest case.

    Checks chats and labels, collators, samplers over ranks and workers with resume, accumulation, and
    random numbers of workers. Without MODEL and options, checks the installed libraries.

    Example: assay smoke data --collator my_library/collate.py:PadAndMask

    Exit code: 0 PASS, 1 FAIL, 2 usage or environment error, 3 not everything could be tried.
    """
    from assay.models.remote_code import remote_code_of
    from assay.output.console import open_console
    from assay.runs import RemoteFunction, RunFolder, ask, open_progress
    from assay.runs.results import VERDICT_FILE, format_verdict, write_results
    from assay_smoke.data.command.requests import DataAnswer, DataRequest
    from assay_smoke.data.command.verdict import judge_data, print_data_verdict

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
    folder = RunFolder.create("smoke data", output).path
    work: RemoteFunction[DataRequest, DataAnswer] = RemoteFunction(
        "assay_smoke.data.command.planned_checks:run_checks"
    )
    with open_progress() as progress:
        answer = ask(work, request, folder, name="data", progress=progress)
    verdict = write_results(judge_data(request, answer), [], folder)
    print_data_verdict(
        verdict, open_console(sys.stderr if as_json else None), folder / VERDICT_FILE
    )
    if as_json:
        print_text(format_verdict(verdict), end="")
    raise typer.Exit(verdict.verdict.exit_code)
