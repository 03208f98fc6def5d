"""The commands `assay bench perf` and `assay bench ab`, and their tables."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from assay.api.options import Model, Option
from assay.cli.derived_commands import with_options
from assay.output.streams import print_text
from assay_bench.options import AsJson, Output, Run

if TYPE_CHECKING:
    from rich.table import Table

    from assay_bench.performance.records import PerformanceResult, SuiteResult
    from assay_bench.performance.running import EnvironmentComparison

_Suites = Annotated[list[str] | None, Option("Repeatable. Default: all.", "NAME")]

_MEBIBYTE = 1 << 20


@with_options
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
    from assay_bench.performance.records import SuiteRequest
    from assay_bench.performance.running import run_suites
    from assay_bench.performance.suite_table import choose_suites

    request = SuiteRequest(suites=choose_suites(suite or []), run=run, model=model)
    folder = RunFolder.create("bench perf", output)
    with open_progress() as progress:
        result = run_suites(request, folder.path.resolve(), progress)
    open_console(sys.stderr if as_json else None).print(performance_table(result))
    if as_json:
        print_text(result.to_json())
    else:
        print_text(f"{result.machine}; samples: {folder.path}")


@with_options
def ab(
    environments: Annotated[
        tuple[Path, Path],
        Option("Virtual environments or Python executables; B is judged.", "ENV_A ENV_B"),
    ],
    *,
    run: Run = "cpu/float32",
    model: Model = "micro:llama",
    suite: _Suites = None,
    margin: Annotated[
        float, Option("Largest acceptable slow-down, as a share: 0.05 is 5 %.", minimum=0.0)
    ] = 0.05,
    blocks: Annotated[
        int, Option("New processes of A and of B. More blocks narrow the interval.")
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
    from assay_bench.performance.records import SuiteRequest
    from assay_bench.performance.running import compare_environments
    from assay_bench.performance.suite_table import choose_suites

    request = SuiteRequest(suites=choose_suites(suite or []), run=run, model=model)
    with open_progress() as progress:
        with progress.step("reads the suites of both environments"):
            sides = Environment.at(environments[0]), Environment.at(environments[1])
        folder = RunFolder.create("bench ab", output)
        result = compare_environments(
            sides,
            request,
            margin=margin,
            num_blocks=blocks,
            folder=folder.path.resolve(),
            progress=progress,
        )
    open_console(sys.stderr if as_json else None).print(comparison_table(result))
    print_text(result.to_json() if as_json else comparison_line(result))
    raise typer.Exit(result.verdict.as_verdict.exit_code)


def performance_table(result: "PerformanceResult") -> "Table":
    """Make a table with one row per suite."""
    from assay.output.console import new_table

    headings = "SUITE", "FASTEST", "TO CONTROL", "TOKENS/S", "OF MATMUL", "OF READ", "PEAK"
    table = new_table(*headings, wraps=False)
    for suite in result.suites:
        table.add_row(suite.suite, *_cells(suite))
    for name, reason in result.skipped.items():
        table.add_row(name, f"skipped: {reason}")
    return table


def comparison_table(result: "EnvironmentComparison") -> "Table":
    """Make a table of the time of B relative to A, with one row per suite."""
    from assay.output.console import new_table

    table = new_table("SUITE", "B TO A", "95 % INTERVAL", "VERDICT", wraps=False)
    for suite in result.suites:
        interval = f"{suite.lower:.3f} to {suite.upper:.3f}"
        table.add_row(suite.suite, f"{suite.ratio:.3f}", interval, suite.speed)
    for name, reason in {**result.not_compared, **result.skipped}.items():
        table.add_row(name, "", "", reason)
    return table


def comparison_line(result: "EnvironmentComparison") -> str:
    """Describe the verdict, its reason, and what to do if it is undecided."""
    from assay_bench.comparing.terms import PairedOutcome

    limit = 1 + result.margin
    match result.verdict:
        case PairedOutcome.PASS:
            words = f"every suite of B takes less than {limit:g} times as long as in A"
        case PairedOutcome.FAIL:
            slower = ", ".join(suite.suite for suite in result.suites if suite.speed == "slower")
            words = f"B takes more than {limit:g} times as long as A in {slower}"
        case PairedOutcome.UNDERPOWERED:
            words = (
                f"an interval contains the limit of {limit:g}; --blocks {4 * len(result.blocks)} halves"
                " the intervals, and an idle machine can narrow them further"
            )
        case _:
            words = "some suites ran on only one side"
    return f"{result.verdict}: {words}"


def _cells(suite: "SuiteResult") -> list[str]:
    return [
        f"{1000 * suite.fastest:.3g} ms",
        f"{suite.ratio:.3g} {suite.control}",
        f"{suite.tokens_per_second:,.0f}" if suite.num_tokens else "",
        f"{suite.flops_share:.1%}" if suite.num_flops else "",
        f"{suite.bytes_share:.1%}" if suite.num_bytes else "",
        f"{suite.peak_memory_bytes / _MEBIBYTE:,.0f} MiB" if suite.peak_memory_bytes else "",
    ]
