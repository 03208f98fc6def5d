"""`assay expect`: capture what a model gives on a device, verify it later, compare two captures."""

from pathlib import Path
from typing import Annotated

import typer

from assay.cli.generation_options import AllowUnused
from assay.output.streams import print_text

app = typer.Typer(
    no_args_is_help=True, help="Capture what a model gives on a device, and verify it later."
)

_AsJson = Annotated[
    bool, typer.Option("--json", help="Print the verdict as JSON and nothing else.")
]


@app.command()
def capture(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder, hub name, or micro:RECIPE.")
    ],
    *,
    run: Annotated[
        str, typer.Option(metavar="RUN", help="Device and dtype that are trusted: cpu/bfloat16.")
    ],
    output: Annotated[
        Path, typer.Option(metavar="FILE.json|DIR", help="A DIR gets a file named by its key.")
    ],
    shapes: Annotated[
        str | None,
        typer.Option(
            metavar="BxTxN,...",
            help="Instead: metrics and references of decoders with these rows, prompt lengths and new"
            " tokens, for `assay calibrate`.",
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="With --shapes: sets of prompts of each shape. Default: 3."
        ),
    ] = None,
    captures: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="How many processes capture, and must agree. Default: 3."
        ),
    ] = None,
    approved_by: Annotated[
        str | None, typer.Option(metavar="NAME", help="Who takes what is captured for right.")
    ] = None,
    reason: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="Why; asked for where a limit of the file before is broken."
        ),
    ] = None,
) -> None:
    """Write what MODEL gives on RUN as an expectation.

    Example: assay expect capture micro:llama --run cpu/float32 --output expectations

    Example: assay expect capture micro:llama --run cpu/float16 --shapes 1x64x16,4x64x16 --output kept

    Exit code: 0; 2 usage or environment error, also if the captures do not agree.
    """
    from assay.errors import UsageError
    from assay.runs import open_progress
    from assay_expectations.capturing import CaptureOptions, capture_expectation

    if shapes is not None:
        if any((approved_by, reason, captures)) or output.suffix == ".json":
            raise UsageError(
                "--shapes writes no expectation: no --approved-by, no --reason, no --captures, and a DIR"
            )
        _capture_metrics(model, run, shapes, seeds or 3, output)
        return
    if seeds is not None:
        raise UsageError("--seeds is of --shapes; an expectation is captured --captures times")
    options = CaptureOptions(
        model=model, run=run, num_captures=captures or 3, approved_by=approved_by, reason=reason
    )
    with open_progress() as progress:
        print_text(capture_expectation(options, output, progress))


def _capture_metrics(model: str, run: str, shapes: str, seeds: int, output: Path) -> None:
    from assay.runs import open_progress
    from assay_expectations.decoders.capturing import MetricsCapture, capture_metrics
    from assay_expectations.decoders.shapes import Shape

    parsed = [Shape.parse(text.strip()) for text in shapes.split(",")]
    with open_progress() as progress:
        for file in capture_metrics(MetricsCapture(model, run, parsed, seeds), output, progress):
            print_text(file)


@app.command()
def verify(
    expectations: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE.json|DIR]...", help="Default: those that are shipped."),
    ] = None,
    *,
    run: Annotated[
        str, typer.Option(metavar="RUN", help="Device and dtype to verify: cpu/bfloat16.")
    ] = "cpu/float32",
    candidate_setup: Annotated[
        str | None,
        typer.Option(metavar="FILE.py:FUNC", help="Called with the model before it runs."),
    ] = None,
    allow_unused: AllowUnused = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Default: runs/<time>-expect-verify.")
    ] = None,
    as_json: _AsJson = False,
) -> None:
    """Do the models still give what was captured on such a machine?

    Exit code: 0 PASS; 1 FAIL, also for an expectation that nothing can meet any more;
    2 usage or environment error; 3 no expectation was captured on such a machine, or part of a model
    never ran. Other versions of software are compared; the verdict lists them.
    """
    from assay.cli.verdict_output import finish
    from assay.runs import RunFolder, open_progress
    from assay_expectations.verifying import verify_expectations

    folder = RunFolder.create("expect verify", output)
    with open_progress() as progress:
        verify_expectations(
            expectations or [], run, folder.path, progress, candidate_setup, allow_unused or ()
        )
    finish(folder.path, as_json=as_json)


@app.command()
def diff(
    expected: Annotated[Path, typer.Argument(metavar="OLD", help="An expectation.")],
    actual: Annotated[Path, typer.Argument(metavar="NEW", help="Another of the same model.")],
    *,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Default: runs/<time>-expect-diff.")
    ] = None,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print what changed for a pull request, and no more.")
    ] = False,
    as_json: _AsJson = False,
) -> None:
    """What changed from OLD to NEW: noise, drift within OLD's limits, or a break; and around them?

    Example: assay expect diff old.json new.json --markdown

    Exit code: 0 noise or drift; 1 a break; 2 usage error; 3 they are not of the same content.
    """
    from assay.api.verdict import CheckedVerdict
    from assay.cli.verdict_output import end_with
    from assay.errors import UsageError
    from assay.runs import RunFolder
    from assay_expectations.verifying import diff_expectations

    if as_markdown and as_json:
        raise UsageError("--markdown and --json: give one of them")
    folder = RunFolder.create("expect diff", output)
    text = diff_expectations(expected, actual, folder.path)
    verdict = CheckedVerdict.publish(folder.path)
    if as_markdown:
        print_text(text, end="")
        raise typer.Exit(verdict.verdict.exit_code)
    end_with(verdict, as_json=as_json)


@app.command()
def page(
    expectations: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE.json|DIR]...", help="Default: those that are shipped."),
    ] = None,
    *,
    runs: Annotated[
        Path, typer.Option(metavar="DIR", help="Where runs of `assay expect verify` lie.")
    ] = Path("runs"),
    output: Annotated[Path, typer.Option(metavar="FILE.html")] = Path("expectations.html"),
) -> None:
    """Write one page over all expectations: which hold, fail, are stale or missing, and how old.

    Example: assay expect page expectations --runs runs --output expectations.html
    """
    from datetime import UTC, datetime

    from assay_expectations.browsing.cells import collect_cells
    from assay_expectations.browsing.page import write_page
    from assay_expectations.verifying import SHIPPED

    now = datetime.now(UTC)
    cells = collect_cells(expectations or [SHIPPED], runs, output, now)
    print_text(write_page(cells, f"{now:%Y-%m-%d}", output))


@app.command()
def schema() -> None:
    """Print the JSON Schema of the files.

    Example: assay expect schema > expectation.schema.json
    """
    import json

    from assay_expectations.records import Expectation

    print_text(json.dumps(Expectation.model_json_schema(), indent=1))
