"""The command `assay expect`."""

import re
from pathlib import Path
from typing import Annotated

import typer

from assay.api.options import Option
from assay.cli.derived_commands import AllowUnused, with_options
from assay.output.streams import print_error, print_text

app = typer.Typer(
    no_args_is_help=True, help="Capture outputs of a model on a device, and verify them later."
)

_Expectations = Annotated[
    list[Path] | None, Option("Default: the shipped files.", "[FILE.json|DIR]...")
]
_Output = Annotated[Path | None, Option("Default: runs/<time>-expect-<command>.", "DIR")]
_AsJson = Annotated[bool, Option("Print the verdict as JSON and nothing else.")]


@app.command()
@with_options
def capture(  # noqa: PLR0913 - one for each option
    models: Annotated[list[str], Option("Folders, hub names, or micro:RECIPE.", "MODEL...")],
    *,
    run: Annotated[str, Option("Trusted device and dtype: cpu/bfloat16.", "RUN")],
    output: Annotated[
        Path,
        Option(
            "Where to write. In a DIR, the file is named for device, dtype and model.",
            "FILE.json|DIR",
        ),
    ],
    captures: Annotated[
        int | None, Option("Number of captures, which must agree. Default: 3.", "N", minimum=1)
    ] = None,
    prompts: Annotated[
        Path | None,
        Option(
            'One prompt a line: {"prompt": TEXT}, {"ids": [...]} or {"messages": [...]}. Or an expectation, to'
            " repeat its inputs. Default: 4 built-in ones and a long one.",
            "FILE.jsonl",
        ),
    ] = None,
    prompt_length: Annotated[
        str | None, Option("Prompt lengths in tokens. Default: 32:96.", "N|LOW:HIGH")
    ] = None,
    batch_size: Annotated[
        int | None, Option("Prompts that run together. Default: 4.", "N", minimum=1)
    ] = None,
    max_new_tokens: Annotated[
        int | None, Option("Tokens to generate for each prompt. Default: 16.", "N", minimum=1)
    ] = None,
    chat: Annotated[bool, Option("Send the texts of --prompts through the chat template.")] = False,
    seed: Annotated[
        int | None, Option("Seed of the prompts and their lengths. Default: 0.", "N")
    ] = None,
    approved_by: Annotated[str | None, Option("Who approves the expectation.", "NAME")] = None,
    reason: Annotated[
        str | None,
        Option("Required if the capture differs from the old file or from the host.", "TEXT"),
    ] = None,
) -> None:
    """Capture the outputs of each MODEL on RUN as an expectation.

    A second capture into the same file repeats the inputs of the first, unless options change them.

    Example: assay expect capture micro:llama --run cpu/float32 --output expectations

    Exit code: 0; 2 usage or environment error, or captures that do not agree.
    """
    from assay.errors import UsageError
    from assay.runs import open_progress
    from assay_expectations.capture_and_verify import (
        capture_expectation,
        with_settings_of_earlier,
    )
    from assay_expectations.records import CaptureOptions

    asked = {
        "prompt_length": prompt_length,
        "batch_size": batch_size,
        "max_new_tokens": max_new_tokens,
        "chat": chat or None,
        "seed": seed,
    }
    given = {name: value for name, value in asked.items() if value is not None}
    if reason == "TEXT" or approved_by == "NAME":
        raise UsageError("--reason TEXT, --approved-by NAME: write the reason or the name itself")
    if (
        re.fullmatch(r"\.[a-z]{2,5}", output.suffix)
        and output.suffix != ".json"
        and not output.is_dir()
    ):
        raise UsageError(f"--output {output}: name a FILE.json or a folder")
    if len(models) > 1 and output.suffix == ".json":
        raise UsageError(f"{output} is a file: several models need a DIR")
    with open_progress() as progress:
        for model in models:
            options = CaptureOptions(
                model=model,
                run=run,
                num_captures=captures or 3,
                prompts=None if prompts is None else str(prompts),
                approved_by=approved_by,
                reason=reason,
            )
            options = with_settings_of_earlier(options, given, output)
            print_text(capture_expectation(options, output, progress))


@app.command()
@with_options
def verify(
    expectations: _Expectations = None,
    *,
    run: Annotated[str, Option("Device and dtype to verify: cpu/bfloat16.", "RUN")] = "cpu/float32",
    model: Annotated[
        str | None, Option("Load this folder or name, not the recorded one.", "MODEL")
    ] = None,
    candidate_setup: Annotated[
        str | None, Option("Call FUNC with the model before it runs.", "FILE.py:FUNC")
    ] = None,
    allow_unused: AllowUnused = None,
    output: _Output = None,
    as_json: _AsJson = False,
) -> None:
    """Verify that models still give the outputs that were captured on this kind of machine.

    Exit code: 0 PASS; 1 FAIL, also for a stale expectation; 2 usage or environment error; 3 nothing was
    captured on this kind of machine, a file cannot be read, or part of a model never ran. Versions of software
    may differ; the verdict lists them.
    """
    from assay.cli.ending import finish
    from assay.devices.registry import find_adapter
    from assay.devices.run_string import parse_device, parse_run
    from assay.runs import RunFolder, open_progress
    from assay_expectations.capture_and_verify import verify_expectations

    find_adapter(parse_device(parse_run(run).device).kind)
    folder = RunFolder.create("expect verify", output)
    with open_progress() as progress:
        verify_expectations(
            expectations or [],
            run,
            folder.path,
            progress,
            candidate_setup,
            allow_unused or (),
            model,
        )
    finish(folder.path, as_json=as_json)


@app.command()
@with_options
def diff(
    expected: Annotated[
        str, Option("An expectation: a file, or a version in git such as HEAD:mine.json.", "OLD")
    ],
    actual: Annotated[str, Option("Another expectation of the same model.", "NEW")],
    *,
    output: _Output = None,
    as_markdown: Annotated[
        bool, Option("Print Markdown for a pull request and nothing else.")
    ] = False,
    as_json: _AsJson = False,
) -> None:
    """Classify the change from OLD to NEW: noise, drift within OLD's limits, or a break.

    Example: assay expect diff old.json new.json --markdown

    Exit code: 0 noise or drift; 1 break; 2 usage error; 3 different content or dtype.
    """
    from assay.api.verdict import CheckedVerdict
    from assay.cli.ending import end_with
    from assay.errors import UsageError
    from assay.runs import RunFolder
    from assay_expectations.capture_and_verify import diff_expectations

    if as_markdown and as_json:
        raise UsageError("--markdown and --json exclude each other")
    folder = RunFolder.create("expect diff", output)
    text = diff_expectations(expected, actual, folder.path)
    verdict = CheckedVerdict.publish(folder.path)
    if as_markdown:
        print_text(text, end="")
        raise typer.Exit(verdict.verdict.exit_code)
    end_with(verdict, as_json=as_json)


@app.command()
@with_options
def page(
    expectations: _Expectations = None,
    *,
    runs: Annotated[Path, Option("Folder of the runs of `assay expect verify`.", "DIR")] = Path(
        "runs"
    ),
    output: Annotated[Path, Option("", "FILE.html")] = Path("expectations.html"),
) -> None:
    """Write an HTML page of all expectations: passed, failed, stale or missing, with their age.

    Example: assay expect page expectations --runs runs --output expectations.html

    Exit code: 0; 2 usage or environment error; 3 a file cannot be read, and the page has the others, if any.
    """
    from datetime import UTC, datetime

    from assay_expectations.capture_and_verify import read_files
    from assay_expectations.page import collect_cells, describe_states, write_page
    from assay_expectations.verdict import SHIPPED

    now = datetime.now(UTC)
    readable, broken = read_files(expectations or [SHIPPED])
    for error in broken.values():
        print_error(f"left out: {error}")
    if readable:
        cells = collect_cells(readable, runs, output, now)
        print_text(write_page(cells, f"{now:%Y-%m-%d}", output))
        print_error(f"cells: {describe_states(cells)}")
    if broken:
        raise typer.Exit(3)


@app.command()
@with_options
def schema() -> None:
    """Print the JSON Schema of expectation files.

    Example: assay expect schema > expectation.schema.json
    """
    import json

    from assay_expectations.records import Expectation

    print_text(json.dumps(Expectation.model_json_schema(), indent=1))
