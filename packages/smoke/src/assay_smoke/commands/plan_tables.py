"""Prints a plan as tables."""

from collections import Counter
from typing import TYPE_CHECKING

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from assay.errors import name_some
from assay.output.console import open_console

if TYPE_CHECKING:
    from assay_smoke.matrix.plans import LeftOutCase, PlannedCase, SmokePlan

# --json lists all.
_CASES_SHOWN = 100
_PAIRS_SHOWN = 6

_LINE_WIDTH = 500

_MINUTE = 60


def print_plan(plan: "SmokePlan") -> None:
    """Print the cases with reasons, the cases left out, and a summary."""
    console = open_console()
    table = _new_table("SECONDS", "PAIRS", "CASE", "WHY")
    for case in plan.cases[:_CASES_SHOWN]:
        pairs = f"+{case.new_pairs}" if case.new_pairs else ""
        why = "; ".join(case.reasons)
        table.add_row(*map(Text, (_seconds(case), pairs, case.id, why)))
    if plan.cases:
        _print_whole(console, table)
    _print_rest(console, len(plan.cases), "cases")
    _print_left_out(console, plan)
    for note in plan.notes:
        _print_line(console, f"note: {note}")
    _print_line(console, _summary(plan))


def print_refused(plan: "SmokePlan") -> None:
    """Print refused combinations, and pairs that several rules together exclude."""
    console = open_console()
    table = _new_table("REFUSED", "WHY")
    for refused in plan.refused:
        table.add_row(*map(Text, (refused.combination, refused.reason)))
    console.print("", table, sep="\n")
    for pair in plan.refused_pairs:
        if len(pair.rules) > 1:
            rules = " and ".join(pair.rules)
            _print_line(console, f"no case has {pair.pair}: the rules {rules} exclude all")


def _print_left_out(console: Console, plan: "SmokePlan") -> None:
    if not plan.left_out:
        return
    table = _new_table("SECONDS", "PAIRS", "LEFT OUT", "WHY")
    for case in plan.left_out[:_CASES_SHOWN]:
        lost = f"-{len(case.lost_pairs)}" if case.lost_pairs else ""
        table.add_row(*map(Text, (_seconds(case), lost, case.id, case.reason)))
    console.print()
    _print_whole(console, table)
    _print_rest(console, len(plan.left_out), "left-out cases")
    lost_pairs = [pair for case in plan.left_out for pair in case.lost_pairs]
    if lost_pairs:
        _print_line(console, f"pairs lost: {name_some(lost_pairs, _PAIRS_SHOWN)}")


def _print_whole(console: Console, table: Table) -> None:
    """Print lines unbroken, so that ids can be copied."""
    needed = Measurement.get(console, console.options.update(max_width=_LINE_WIDTH), table).maximum
    open_console(width=max(needed, console.width)).print(table)


def _print_line(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _print_rest(console: Console, number: int, what: str) -> None:
    if number > _CASES_SHOWN:
        console.print(f"and {number - _CASES_SHOWN:,} more {what}: --json lists all")


def _summary(plan: "SmokePlan") -> str:
    cases = plan.cases
    sources = Counter("recorded" if case.recorded else "estimated" for case in cases)
    known = ", ".join(f"{number} {source}" for source, number in sources.items())
    return (
        f"\n{len(cases):,} cases, {plan.pairs.covered} of {plan.pairs.possible} pairs of"
        f" values that can meet, about {_time(plan.expected_seconds)} on {plan.machine}"
        + (f" (times: {known})" if known else "")
    )


def _seconds(case: "PlannedCase | LeftOutCase") -> str:
    """Format the expected time, with "~" for an estimate."""
    return f"{'' if case.recorded else '~'}{case.expected_seconds:.0f}"


def _time(seconds: float) -> str:
    return f"{seconds / _MINUTE:.0f} min" if seconds >= 2 * _MINUTE else f"{seconds:.0f} s"


def _new_table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
