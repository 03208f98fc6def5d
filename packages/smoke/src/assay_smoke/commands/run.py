"""`assay smoke run`: runs cases of the matrix and training libraries."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from assay.api.options import Option
from assay.cli.derived_commands import with_options
from assay.output.streams import print_error, print_text

if TYPE_CHECKING:
    from assay_smoke.session.results import CaseResult

_Coverage = Literal["one", "pairwise", "full"]


@with_options
def run(  # noqa: PLR0913 - one for each option
    names: Annotated[
        list[str] | None,
        Option(
            "Case ids from `assay smoke plan`, or command:FILE.toml for a training library with"
            " its own command line. Default: the plan.",
            "[CASE|command:FILE.toml]...",
        ),
    ] = None,
    *,
    plan: Annotated[
        Path | None, Option("Run the plan that `assay smoke plan --json` wrote.", "FILE")
    ] = None,
    extra: Annotated[
        list[str] | None,
        typer.Option(
            "--with", metavar="command:FILE.toml", help="Also run this library; repeatable."
        ),
    ] = None,
    device: Annotated[str, Option("Device to train on, as in `assay devices`.", "DEVICE")] = "cpu",
    run: Annotated[
        str | None, Option("DEVICE/DTYPE: run only cases in this dtype, on this device.", "RUN")
    ] = None,
    coverage: Annotated[
        _Coverage, Option("Coverage of pairs of values; see `assay smoke plan`.")
    ] = "pairwise",
    cards: Annotated[
        int | None, Option("Most ranks per case. Default: 4 on a CPU, else all devices.", minimum=1)
    ] = None,
    budget: Annotated[
        str | None, Option("Run the most valuable cases in this time.", "30m")
    ] = None,
    keyword: Annotated[
        str | None,
        typer.Option("-k", metavar="EXPR", help="Run only matching ids, as in `pytest -k`."),
    ] = None,
    trainer: Annotated[
        str | None,
        Option(
            "Replace the trainer of each case; see `assay check train --candidate-trainer`.",
            "NAME|FILE.py:CLASS",
        ),
    ] = None,
    timeout: Annotated[
        float, Option("Limit of each world of ranks; a case has up to five.", "SECONDS", minimum=1)
    ] = 300.0,
    output: Annotated[Path | None, Option("Default: runs/<time>-smoke-run.", "DIR")] = None,
    as_json: Annotated[bool, Option("Print one JSON object and nothing else.")] = False,
) -> None:
    """Test whether training survives setup, steps, checkpoint, resume and teardown, in every feature.

    Example: assay smoke run --coverage one

    One case: assay smoke run fsdp-2-lora-offload

    Your own library: assay smoke run command:examples/plain_training/smoke.toml

    Exit code: 0 all PASS, 1 any FAIL, 2 usage or machine error, 3 any not compared.
    """
    from assay_smoke.session.command import SessionOptions, run_session
    from assay_smoke.session.results import describe_extent, describe_outcomes

    options = SessionOptions(
        names=tuple(names or ()),
        plan=plan,
        extra=tuple(extra or ()),
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
        print_text(f"{describe_outcomes(report)}: {describe_extent(report)}")
        print_text(f"report: {page}")
    raise typer.Exit(report.exit_code)


def _tell(result: "CaseResult", number: int, total: int) -> None:
    """Print one line per result to standard error."""
    from rich.text import Text

    from assay.output.console import open_console

    again = f", run {result.tries} times: {result.tried_again_for}" if result.tries > 1 else ""
    color = "blue" if result.word == "PASS" else "red"
    rest = f" {result.name} ({result.seconds:.1f} s{again})"
    line = Text.assemble(f"[{number}/{total}] ", (result.word, color), rest)
    open_console(sys.stderr).print(line, soft_wrap=True)
    if reason := result.error or result.reason:
        print_error(f"    {reason}\n    {result.command}")
