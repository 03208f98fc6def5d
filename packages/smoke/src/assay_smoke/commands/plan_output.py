"""Print the plan of a session: its cases, the cases left out, and the refused combinations."""

from collections import Counter

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from assay.errors import name_some
from assay.output.console import new_table, open_console
from assay_smoke.matrix.planning import LeftOutCase, PlannedCase, SmokePlan

# --json lists all.
_CASES_SHOWN = 100
_PAIRS_SHOWN = 6

_LINE_WIDTH = 500

_MINUTE = 60


def print_plan(planned: SmokePlan) -> None:
    """Print the cases with reasons, the cases left out, and a summary."""
    console = open_console()
    table = new_table("SECONDS", "PAIRS", "CASE", "WHY")
    for case in planned.cases[:_CASES_SHOWN]:
        pairs = f"+{case.new_pairs}" if case.new_pairs else ""
        why = "; ".join(case.reasons)
        table.add_row(*map(Text, (_seconds(case), pairs, case.id, why)))
    if planned.cases:
        _print_whole(console, table)
    _print_rest(console, len(planned.cases), "cases")
    _print_left_out(console, planned)
    for note in planned.notes:
        _print_line(console, f"note: {note}")
    _print_line(console, _summary(planned))


def print_refused(planned: SmokePlan) -> None:
    """Print refused combinations."""
    console = open_console()
    table = new_table("REFUSED", "WHY")
    for refused in planned.refused:
        table.add_row(*map(Text, (refused.combination, refused.reason)))
    console.print("", table, sep="\n")


def _print_left_out(console: Console, planned: SmokePlan) -> None:
    if not planned.left_out:
        return
    table = new_table("SECONDS", "PAIRS", "LEFT OUT", "WHY")
    for case in planned.left_out[:_CASES_SHOWN]:
        lost = f"-{len(case.lost_pairs)}" if case.lost_pairs else ""
        table.add_row(*map(Text, (_seconds(case), lost, case.id, case.reason)))
    console.print()
    _print_whole(console, table)
    _print_rest(console, len(planned.left_out), "left-out cases")
    lost_pairs = [pair for case in planned.left_out for pair in case.lost_pairs]
    if lost_pairs:
        _print_line(console, f"pairs lost: {name_some(lost_pairs, _PAIRS_SHOWN)}")


def _print_whole(console: Console, table: Table) -> None:
    """Print lines unbroken, so that ids can be copied."""
    needed = Measurement.get(console, console.options.update(max_width=_LINE_WIDTH), table).maximum
    open_console(width=max(needed, console.width)).print(table)


def _print_line(console: Console, line: str) -> None:
    console.print(line, soft_wrap=True)


def _print_rest(console: Console, number: int, what: str) -> None:
    if number > _CASES_SHOWN:
        console.print(f"and {number - _CASES_SHOWN:,} more {what}: --json lists all")


def _summary(planned: SmokePlan) -> str:
    cases = planned.cases
    sources = Counter("recorded" if case.recorded else "estimated" for case in cases)
    known = ", ".join(f"{number} {source}" for source, number in sources.items())
    return (
        f"\n{len(cases):,} cases, {planned.pairs.covered} of {planned.pairs.possible} pairs of"
        f" values that can meet, about {_time(planned.expected_seconds)} on {planned.machine}"
        + (f" (times: {known})" if known else "")
    )


def _seconds(case: PlannedCase | LeftOutCase) -> str:
    """Format the expected time, with "~" for an estimate."""
    return f"{'' if case.recorded else '~'}{case.expected_seconds:.0f}"


def _time(seconds: float) -> str:
    return f"{seconds / _MINUTE:.0f} min" if seconds >= 2 * _MINUTE else f"{seconds:.0f} s"
