"""Tables of the speed of a machine, and of two environments."""

from rich.table import Table

from assay.output.console import new_table
from assay_bench.comparing.terms import PairedOutcome
from assay_bench.performance.records import PerformanceResult, SuiteResult
from assay_bench.performance.running import EnvironmentComparison

_MEBIBYTE = 1 << 20


def performance_table(result: PerformanceResult) -> Table:
    """Make a table with one row per suite."""
    headings = "SUITE", "FASTEST", "TO CONTROL", "TOKENS/S", "OF MATMUL", "OF READ", "PEAK"
    table = new_table(*headings, wraps=False)
    for suite in result.suites:
        table.add_row(suite.suite, *_cells(suite))
    for name, reason in result.skipped.items():
        table.add_row(name, f"skipped: {reason}")
    return table


def comparison_table(result: EnvironmentComparison) -> Table:
    """Make a table of the time of B relative to A, with one row per suite."""
    table = new_table("SUITE", "B TO A", "95 % INTERVAL", "VERDICT", wraps=False)
    for suite in result.suites:
        interval = f"{suite.lower:.3f} to {suite.upper:.3f}"
        table.add_row(suite.suite, f"{suite.ratio:.3f}", interval, suite.speed)
    for name, reason in {**result.not_compared, **result.skipped}.items():
        table.add_row(name, "", "", reason)
    return table


def comparison_line(result: EnvironmentComparison) -> str:
    """Describe the verdict, its reason, and what to do if it is undecided."""
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


def _cells(suite: SuiteResult) -> list[str]:
    return [
        f"{1000 * suite.fastest:.3g} ms",
        f"{suite.ratio:.3g} {suite.control}",
        f"{suite.tokens_per_second:,.0f}" if suite.num_tokens else "",
        f"{suite.flops_share:.1%}" if suite.num_flops else "",
        f"{suite.bytes_share:.1%}" if suite.num_bytes else "",
        f"{suite.peak_memory_bytes / _MEBIBYTE:,.0f} MiB" if suite.peak_memory_bytes else "",
    ]
