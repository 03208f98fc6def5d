"""`assay smoke run`: cases of the matrix, and external training libraries, one after the other."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.text import Text

from assay.output.console import open_console
from assay.output.streams import print_error, print_text

if TYPE_CHECKING:
    from assay_smoke.session.results import CaseResult

_Coverage = Literal["one", "pairwise", "full"]


def run(  # noqa: PLR0913 - one for each option
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CASE|command:FILE.toml]...",
            help="Ids of cases, as `assay smoke plan` prints them, or command:FILE.toml for a"
            " training library with a command line of its own. Default: the plan.",
        ),
    ] = None,
    *,
    plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Run what `assay smoke plan --json` printed into FILE."),
    ] = None,
    beside: Annotated[
        list[str] | None,
        typer.Option(
            "--with", metavar="command:FILE.toml", help="Run this beside the plan; repeatable."
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="Where to train: one that `assay devices` lists.")
    ] = "cpu",
    run: Annotated[
        str | None,
        typer.Option(
            "--run",
            metavar="RUN",
            help="As DEVICE/DTYPE: only cases in this dtype, on this device.",
        ),
    ] = None,
    coverage: Annotated[
        _Coverage, typer.Option(help="Of pairs of values; see `assay smoke plan`.")
    ] = "pairwise",
    cards: Annotated[
        int | None,
        typer.Option(min=1, help="Most ranks of a case. Default: 4 on a host, else all devices."),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="TIME", help="As 30m: the most valuable cases within it.")
    ] = None,
    keyword: Annotated[
        str | None,
        typer.Option("-k", metavar="EXPRESSION", help="Only ids that match, as pytest has it."),
    ] = None,
    trainer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE.py:CLASS",
            help="Trains in place of each case's own, as in `assay check train --candidate-trainer`.",
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=1, help="Of each world of ranks; a case has up to five."
        ),
    ] = 300.0,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Default: runs/<time>-smoke-run.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Does training survive set-up, steps, checkpoint, resume and tear-down here, in every feature?

    Example: assay smoke run --coverage one

    One case: assay smoke run fsdp-2-lora-offload

    Your own library: assay smoke run command:examples/plain_training/smoke.toml

    Exit code: 0 all PASS, 1 one FAILs, 2 usage or the machine, 3 one could not be compared.
    """
    from assay_smoke.session.command import SessionOptions, run_session
    from assay_smoke.session.summary import extent_in_words, outcomes_in_words

    options = SessionOptions(
        names=tuple(names or ()),
        plan=plan,
        beside=tuple(beside or ()),
        device=device if run is None else run.partition("/")[0],
        precision=None if run is None else run.partition("/")[2],
        coverage=coverage,
        cards=cards,
        budget=budget,
        keyword=keyword,
        trainer=trainer,
        timeout=timeout,
    )
    report, page = run_session(options, output, _tell)
    if as_json:
        print_text(report.model_dump_json(by_alias=True, indent=1))
    else:
        print_text(f"{outcomes_in_words(report)}: {extent_in_words(report)}")
        print_text(f"report: {page}")
    raise typer.Exit(report.exit_code)


def _tell(result: "CaseResult", number: int, total: int) -> None:
    """One line for each result, on standard error, as soon as it is there."""
    again = f", run {result.tries} times: {result.tried_again_for}" if result.tries > 1 else ""
    color = "blue" if result.word == "PASS" else "red"
    rest = f" {result.name} ({result.seconds:.1f} s{again})"
    line = Text.assemble(f"[{number}/{total}] ", (result.word, color), rest)
    open_console(sys.stderr).print(line, soft_wrap=True)
    if reason := result.error or result.reason:
        print_error(f"    {reason}\n    {result.command}")
