"""The `assay smoke` commands. Importing this module imports no torch."""

import sys
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TextIO

import typer

from assay.api.options import Option
from assay.cli.derived_commands import with_options
from assay.errors import UsageError
from assay.output.streams import print_error, print_text
from assay_smoke.data.protocols import FeatureKind, Truncation

if TYPE_CHECKING:
    from assay_smoke.session.command import CaseResult


_OWN = "FILE.py:NAME"
_Coverage = Literal["one", "pairwise", "full"]


@with_options
def data(  # noqa: PLR0913 - one for each option
    model: Annotated[
        str | None,
        Option(
            "Check the chat template of a folder with a tokenizer, or of a hub name.", "[MODEL]"
        ),
    ] = None,
    *,
    render: Annotated[
        str | None,
        Option("(tokenizer, messages, max_length) -> ids and labels.", _OWN, group="Chats"),
    ] = None,
    truncation: Annotated[
        Truncation | None,
        Option("Declare how long chats are cut. Default: any of these ways passes."),
    ] = None,
    trust_remote_code: Annotated[bool, Option("Run code from the model's repository.")] = False,
    collator: Annotated[
        str | None, Option("(tokenizer) -> collator that pads.", _OWN, group="Collators")
    ] = None,
    packing: Annotated[
        str | None, Option("(tokenizer) -> collator that packs samples into rows.", _OWN)
    ] = None,
    features: Annotated[
        FeatureKind, Option("Samples for collators: with masked labels, or without labels.")
    ] = "masked",
    sampler: Annotated[
        str | None,
        Option("(plan, resumed) -> epochs of batches of sample numbers.", _OWN, group="Samplers"),
    ] = None,
    batch_sampler: Annotated[
        str | None, Option("The same with a token budget per batch.", _OWN)
    ] = None,
    accumulation: Annotated[
        str | None,
        Option(
            "(model, micro_batches, num_step_tokens, num_ranks): runs backward passes.",
            _OWN,
            group="Accumulation and workers",
        ),
    ] = None,
    loader: Annotated[
        str | None, Option("(dataset, num_workers, rank) -> DataLoader with your seeding.", _OWN)
    ] = None,
    dataset: Annotated[str | None, Option("(samples) -> dataset with random items.", _OWN)] = None,
    output: Annotated[
        Path | None, Option("Default: runs/<time>-smoke-data.", "DIR", group="Output")
    ] = None,
    as_json: Annotated[bool, Option("Print the verdict as JSON and nothing else.")] = False,
) -> None:
    """Test the data side of a training run, and show the smallest failing case of each property.

    Checks chats and labels, collators, samplers over ranks and workers with resume, accumulation, and
    random numbers of workers. Without MODEL and options, checks the installed libraries.

    Example: assay smoke data --collator my_library/collate.py:PadAndMask

    Exit code: 0 PASS, 1 FAIL, 2 usage or environment error, or your code raised one, 3 a property of a level
    that ran was never tried.
    """
    from assay.launch import RemoteFunction, call
    from assay.models.sources import remote_code_of
    from assay.output.console import open_console
    from assay.report.page.html import publish_one
    from assay.report.run_report import read_report
    from assay.report.text_formats import print_report
    from assay.runs import RunFolder, open_progress
    from assay.runs.results import format_verdict, write_results
    from assay_smoke.data.verdict import DataAnswer, DataRequest, judge_data

    own_code = {
        "render": render, "collator": collator, "packing": packing, "sampler": sampler,
        "batch_sampler": batch_sampler, "accumulation": accumulation, "loader": loader,
        "dataset": dataset,
    }  # fmt: skip
    request = DataRequest(
        model=model,
        own_code={option: code for option, code in own_code.items() if code is not None},
        truncation=truncation,
        features=features,
        remote_code=remote_code_of(trusted=trust_remote_code),
    )
    request.require_meaning()
    folder = RunFolder.create("smoke data", output).path
    work: RemoteFunction[DataRequest, DataAnswer] = RemoteFunction(
        "assay_smoke.data.planned_checks:run_checks"
    )
    with open_progress() as progress:
        (answer,) = call(work, request, folder=folder, name="data", progress=progress)
    verdict = write_results(judge_data(request, answer), [], folder)
    report = read_report(folder)
    print_report(report, open_console(sys.stderr if as_json else None), publish_one(report))
    if as_json:
        print_text(format_verdict(verdict), end="")
    for error in answer.errors:
        print_error(f"assay: {error}")
    raise typer.Exit(UsageError.exit_code if answer.errors else verdict.verdict.exit_code)


@with_options
def plan(
    *,
    vendor: Annotated[
        str, Option("Vendor of the cards; a wrong name lists them.", "NAME", group="Cases")
    ] = "cpu",
    cards: Annotated[int, Option("Largest number of cards per case.", "N")] = 4,
    coverage: Annotated[
        _Coverage,
        Option(
            "Each framework once; every possible pair of values; every case.", "one|pairwise|full"
        ),
    ] = "pairwise",
    expression: Annotated[
        str | None,
        typer.Option("-k", metavar="EXPR", help="Take only ids that match, like `pytest -k`."),
    ] = None,
    as_json: Annotated[
        bool, Option("Print one JSON object and nothing else.", group="Output")
    ] = False,
) -> None:
    """Show the cases that `assay smoke run` would run, and the pairs of values that each one adds.

    Runs nothing and needs no device.

    Example: assay smoke plan --vendor amd --cards 4

    Exit code: 0; 2 for wrong options.
    """
    from assay_smoke.matrix.rules import plan_smoke, print_plan, require_vendor

    planned = plan_smoke(require_vendor(vendor), cards, coverage, expression)
    if as_json:
        print_text(planned.model_dump_json(by_alias=True, indent=1))
    else:
        print_plan(planned)


def _require_cases(names: list[str] | None) -> list[str] | None:
    """Check names and the files of libraries as an option is parsed, so that `assay ci plan` does too."""
    from assay_smoke.external.library import COMMAND, find_files, read_library, require_files
    from assay_smoke.matrix.rules import case_of

    for toml in find_files(names or ()):
        require_files(read_library(toml), toml)
    for name in names or ():
        if not name.startswith(COMMAND):
            case_of(name)
    return names


@with_options
def run(  # noqa: PLR0913 - one for each option
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CASE|command:FILE.toml]...",
            help="Case ids from `assay smoke plan`, or command:FILE.toml for a training library with"
            " its own command line. Default: the plan.",
            callback=_require_cases,
        ),
    ] = None,
    *,
    coverage: Annotated[
        _Coverage, Option("Coverage of pairs of values; see `assay smoke plan`.", group="Cases")
    ] = "pairwise",
    cards: Annotated[
        int | None,
        Option("Most ranks per case. Default: 4 on a CPU, else all devices.", "N", minimum=1),
    ] = None,
    budget: Annotated[str | None, Option("Start no case after this time.", "30m")] = None,
    keyword: Annotated[
        str | None,
        typer.Option("-k", metavar="EXPR", help="Run only ids that match, like `pytest -k`."),
    ] = None,
    device: Annotated[
        str | None,
        Option(
            "Device to train on; `assay devices` lists them. Default: cpu, or that of FILE.toml.",
            "DEVICE",
            group="Training",
        ),
    ] = None,
    run: Annotated[
        str | None, Option("DEVICE/DTYPE: run only cases in this dtype, on this device.", "RUN")
    ] = None,
    trainer: Annotated[
        str | None,
        Option(
            "Replace the trainer of each case; see `assay check train --candidate-trainer`.",
            "NAME|FILE.py:CLASS",
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        Option(
            "Limit of each world of ranks; a case has up to five. Default: 300.",
            "SECONDS",
            minimum=1,
        ),
    ] = None,
    output: Annotated[
        Path | None, Option("Default: runs/<time>-smoke-run.", "DIR", group="Output")
    ] = None,
    as_json: Annotated[bool, Option("Print one JSON object and nothing else.")] = False,
) -> None:
    """Test whether training survives setup, steps, checkpoint, resume and teardown, in every feature.

    Example: assay smoke run --coverage one

    One case: assay smoke run fsdp-2-lora-offload

    Your own library: assay smoke run command:examples/plain_training/smoke.toml

    Exit code: 0 all PASS, 1 any FAIL, 2 usage or machine error, 3 any not compared.
    """
    from assay.recording.limits import parse_time
    from assay_smoke.external.levels import describe_unjudged
    from assay_smoke.external.library import find_files, read_library
    from assay_smoke.session.command import (
        SessionOptions,
        describe_extent,
        describe_outcomes,
        external_item,
        run_session,
    )

    options = SessionOptions(
        names=tuple(names or ()),
        own_device=device if run is None else run.partition("/")[0],
        precision=None if run is None else run.partition("/")[2],
        coverage=coverage,
        cards=cards,
        budget_seconds=inf if budget is None else parse_time(budget),
        keyword=keyword,
        trainer=trainer,
        timeout=timeout,
    )
    tell = partial(_tell, results=sys.stderr if as_json else sys.stdout)
    report, page = run_session(options, output, tell)
    if as_json:
        print_text(report.model_dump_json(by_alias=True, indent=1))
    else:
        print_text(f"{describe_outcomes(report)}: {describe_extent(report)}")
        judged = {case.name for case in report.cases if case.outcome != "ERROR"}
        if tomls := [one for one in find_files(options.names) if external_item(one).name in judged]:
            print_text(describe_unjudged(map(read_library, tomls)))
        print_text(f"report: {page}")
    raise typer.Exit(report.exit_code)


def _tell(result: "CaseResult", number: int, total: int, folder: Path, *, results: TextIO) -> None:
    """Print one line. Unless it is a whole PASS, add its reason, the command of one of several, and its folder."""
    from rich.text import Text

    from assay.output.console import open_console

    console = open_console(results)
    again = f", run {result.tries} times: {result.tried_again_for}" if result.tries > 1 else ""
    color = "blue" if result.outcome == "PASS" else "red"
    rest = f" {result.name} ({result.seconds:.1f} s{again})"
    line = Text.assemble(f"[{number}/{total}] ", (result.outcome, color), rest)
    console.print(line, soft_wrap=True)
    if result.reason:
        lines = [*result.reason.splitlines(), *[result.command] * (total > 1), f"logs: {folder}"]
        console.print(Text("\n".join(f"    {line}" for line in lines)), soft_wrap=True)


app = typer.Typer(
    no_args_is_help=True, help="Train a few steps through setup, checkpoint and resume."
)
app.command()(plan)
app.command()(run)
app.command()(data)
