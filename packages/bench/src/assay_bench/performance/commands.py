"""The commands `assay bench perf` and `assay bench ab`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from assay.output.streams import print_text
from assay_bench.options import AsJson, Model, Output, Run

_Suites = Annotated[
    list[str] | None,
    typer.Option("--suite", metavar="NAME", help="Repeatable. Default: all."),
]


def perf(
    *,
    run: Run = "cpu/float32",
    model: Model = "micro:llama",
    suite: _Suites = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Measure the speed of training, generation and assay itself on this machine.

    Times are compared with this machine's own matrix product and read bandwidth, measured between rounds.

    Example: assay bench perf --suite training-step --suite decode

    Exit code: 0 measured, 2 usage or environment error, or a failed suite.
    """
    from assay.output.console import open_console
    from assay.runs import RunFolder, open_progress
    from assay_bench.performance.requests import SuiteRequest
    from assay_bench.performance.running import run_suites
    from assay_bench.performance.suite_table import choose_suites
    from assay_bench.performance.tables import performance_table

    chosen = choose_suites(suite or [])
    folder = RunFolder.create("bench perf", output)
    with open_progress() as progress:
        result = run_suites(
            SuiteRequest(run=run, model=model), chosen, folder.path.resolve(), progress
        )
    open_console(sys.stderr if as_json else None).print(performance_table(result))
    if as_json:
        print_text(result.to_json())
    else:
        print_text(f"{result.machine}; samples: {folder.path}")


def ab(
    environments: Annotated[
        tuple[Path, Path],
        typer.Argument(
            metavar="ENV_A ENV_B", help="Virtual environments or Python executables; B is judged."
        ),
    ],
    *,
    run: Run = "cpu/float32",
    model: Model = "micro:llama",
    suite: _Suites = None,
    margin: Annotated[
        float, typer.Option(min=0.0, help="Largest acceptable slow-down, as a share: 0.05 is 5 %.")
    ] = 0.05,
    blocks: Annotated[
        int, typer.Option(help="New processes of A and of B. More blocks narrow the interval.")
    ] = 10,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Compare the speed of two Python environments, which take turns on this machine.

    Example: assay bench ab /opt/torch-2.12 /opt/torch-2.13 --suite training-step

    Exit code: 0 PASS, 1 FAIL (B is slower by more than the margin), 2 usage or environment error, 3 the
    interval is too wide, or a suite ran on only one side.
    """
    from assay.output.console import open_console
    from assay.runs import RunFolder, open_progress
    from assay_bench.performance.environments import Environment
    from assay_bench.performance.paired.running import compare_environments
    from assay_bench.performance.requests import SuiteRequest
    from assay_bench.performance.suite_table import choose_suites
    from assay_bench.performance.tables import comparison_line, comparison_table

    chosen = choose_suites(suite or [])
    with open_progress() as progress:
        with progress.step("reads the suites of both environments"):
            sides = Environment.at(environments[0]), Environment.at(environments[1])
        folder = RunFolder.create("bench ab", output)
        result = compare_environments(
            sides,
            chosen,
            SuiteRequest(run=run, model=model),
            margin=margin,
            num_blocks=blocks,
            folder=folder.path.resolve(),
            progress=progress,
        )
    open_console(sys.stderr if as_json else None).print(comparison_table(result))
    print_text(result.to_json() if as_json else comparison_line(result))
    raise typer.Exit(result.verdict.as_verdict.exit_code)
