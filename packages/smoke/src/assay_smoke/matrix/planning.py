"""Makes the plan of a session: selects, orders and schedules cases, and prints them.

The plan is written as JSON. It follows from the matrix, recorded runs and the user's options. One JSON file
holds the last runs of every case. It is a cache: without it, plans use estimates.
"""

import heapq
import os
import platform
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

from pydantic import Field
from rich.console import Console
from rich.measure import Measurement
from rich.text import Text

from assay.errors import UsageError, name_some
from assay.files import DiskError, UnreadableFileError, read_record, write_whole
from assay.output.console import new_table, open_console
from assay.runs.folders import cache_folder, locked
from assay.verdicts import SCHEMA, Outcome, Record
from assay_smoke.matrix.rules import (
    FEATURES,
    HOST,
    Case,
    CaseIdError,
    Coverage,
    Pair,
    Rule,
    case_of,
    choose_cases,
    covered_pairs,
    pair_in_words,
    pairs_of,
    rules_for,
    rules_of_vendor,
)

# Enough runs for a median that one slow run does not move.
RUNS_KEPT = 5

# Rough times on two CPU cores, until a run is recorded. Starting ranks and reading checkpoints take
# most of it.
_START_SECONDS = 5.0
_SECONDS_A_RANK = 1.0


class RecordedRun(Record):
    """A past run of a case."""

    seconds: float = Field(ge=0, allow_inf_nan=False)
    outcome: Outcome
    time: datetime


class History(Record):
    """The last runs of every case, the newest last, by kind of machine and case id."""

    schema_: int = Field(default=SCHEMA, alias="schema")
    machines: dict[str, dict[str, Annotated[list[RecordedRun], Field(min_length=1)]]] = Field(
        default_factory=dict
    )
    problem: str | None = Field(default=None, exclude=True)
    """Why the file could not be read. Not written."""


@dataclass(frozen=True, slots=True)
class Durations:
    """Expected times of cases on one kind of machine."""

    history: History
    machine: str
    slowness: float = 1.0
    """Median of recorded time over estimated time."""

    @classmethod
    def of(cls, history: History, machine: str) -> "Durations":
        """Read the runs on `machine` from `history`."""
        ratios = []
        for case_id, runs in history.machines.get(machine, {}).items():
            with suppress(CaseIdError):  # recorded by a version with other words
                ratios.append(_typical_seconds(runs) / estimated_seconds(case_of(case_id)))
        return cls(history, machine, median(ratios) if ratios else 1.0)

    def runs_of(self, case: Case) -> list[RecordedRun]:
        """Return the last runs of `case` on this kind of machine, the newest last."""
        return self.history.machines.get(self.machine, {}).get(case.id, [])

    def num_failures(self, case: Case) -> int:
        """Count the recorded runs of `case` that did not pass."""
        return sum(run.outcome is not Outcome.PASS for run in self.runs_of(case))

    def expected_seconds(self, case: Case) -> float:
        """Return the recorded time of `case`, or its estimate scaled by the slowness of the machine."""
        runs = self.runs_of(case)
        return _typical_seconds(runs) if runs else estimated_seconds(case) * self.slowness


def estimated_seconds(case: Case) -> float:
    """Estimate the time of a case from its framework, cards and features."""
    ranks = case.cards if case.framework != "one-process" else 0
    extra = sum(FEATURES[name].extra_seconds for name in case.features)
    return _START_SECONDS + _SECONDS_A_RANK * ranks + extra


def machine_kind(vendor: str) -> str:
    """Return the kind of machine for which durations are recorded: of a host, its architecture and cores."""
    if vendor != HOST:
        return vendor
    return f"{vendor}-{platform.machine() or 'unknown'}-{os.cpu_count() or 1}"


def history_file() -> Path:
    """Return the file with this user's recorded runs."""
    return cache_folder() / "smoke-history.json"


def read_history(path: Path) -> History:
    """Read a history. A file that cannot be read gives a history with a `problem`."""
    if not path.exists():
        return History(schema=SCHEMA)
    try:
        return read_record(History, path)
    except UnreadableFileError as error:
        return History(schema=SCHEMA, problem=f"not used: {error}")


def record_runs(path: Path, machine: str, runs: Iterable[tuple[Case, RecordedRun]]) -> None:
    """Append runs to the history in `path`, which other processes may update.

    Raises: DiskError if it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock")):
            history = read_history(path)
            of_machine = history.machines.setdefault(machine, {})
            for case, run in runs:
                of_machine[case.id] = [*of_machine.get(case.id, ()), run][-RUNS_KEPT:]
            write_whole(path, history.model_dump_json(by_alias=True) + "\n")
    except OSError as error:
        raise DiskError.refused(path, error) from error


def _typical_seconds(runs: Sequence[RecordedRun]) -> float:
    """Return the median of passed runs. If none passed, return the longest: a hang may repeat."""
    passed = [run.seconds for run in runs if run.outcome is Outcome.PASS]
    return median(passed) if passed else max(run.seconds for run in runs)


Matches = Callable[[str], bool]

_TOKEN = re.compile(r"\s*([()]|[\w:+.\[\]\\/-]+)")
_END = ""


def compile_expression(text: str) -> Matches:
    """Return a function that tests whether an id matches `text`.

    Raises: UsageError.
    """
    source: list[str] = []
    depth, wants_word = 0, True
    for symbol, column in _tokens(text):
        if wants_word and symbol in ("and", "or", ")", _END):
            raise _error(text, column, "a word of an id was expected")
        if not wants_word and depth and symbol not in ("and", "or", ")"):
            raise _error(text, column, "a closing parenthesis was expected")
        if not wants_word and not depth and symbol not in ("and", "or", _END):
            raise _error(text, column, "and, or, or the end was expected")
        wants_word = symbol in ("and", "or", "not", "(")
        depth += (symbol == "(") - (symbol == ")")
        is_word = symbol not in ("and", "or", "not", "(", ")", _END)
        source.append(f"({symbol.lower()!r} in name)" if is_word else symbol)
    code = compile(" ".join(source), "-k", "eval")
    return lambda name: bool(eval(code, {"name": name.lower()}))  # noqa: S307 - words are quoted


def _tokens(text: str) -> list[tuple[str, int]]:
    """Split into words, parentheses and the end, each with its column from 1."""
    tokens, position = [], 0
    while rest := text[position:].lstrip():
        found = _TOKEN.match(text, position)
        if found is None:
            column = len(text) - len(rest) + 1
            raise _error(text, column, f"{rest[0]!r} cannot be in an id")
        tokens.append((found[1], found.start(1) + 1))
        position = found.end()
    return [*tokens, (_END, len(text) + 1)]


def _error(text: str, column: int, problem: str) -> UsageError:
    """Describe the problem at `column`, counted from 1."""
    return UsageError(
        f"-k {text!r}: {problem} at column {column}; as in -k 'fsdp and not (lora or 4)'"
    )


_BUDGET = re.compile(
    r"(?:(?P<hours>\d+(?:\.\d+)?)h)?(?:(?P<minutes>\d+(?:\.\d+)?)m)?(?:(?P<seconds>\d+(?:\.\d+)?)s)?"
)
_SECONDS = {"hours": 3600, "minutes": 60, "seconds": 1}


@dataclass(frozen=True, slots=True)
class OrderedCase:
    """A case at its place in the order."""

    case: Case
    new_pairs: tuple[Pair, ...]
    """Pairs of words that no earlier case has."""


def order_by_value(
    cases: Sequence[Case],
    urgency: Callable[[Case], tuple[bool, ...]],
    expected_seconds: Callable[[Case], float],
) -> list[OrderedCase]:
    """Order `cases` by falling urgency, then by new pairs per second."""
    seen: set[Pair] = set()

    def rank(case: Case) -> tuple[list[bool], float, float, str]:
        new = len(set(pairs_of(case)) - seen)
        seconds = max(expected_seconds(case), 1e-9)
        return [not urgent for urgent in urgency(case)], -new / seconds, seconds, case.id

    queue = [(rank(case), number) for number, case in enumerate(cases)]
    heapq.heapify(queue)
    ordered = []
    while queue:
        case = cases[queue[0][1]]
        # New pairs only become fewer, so a case that stays first after its recount is the best.
        if (renewed := (rank(case), queue[0][1])) > queue[0]:
            heapq.heapreplace(queue, renewed)
            continue
        heapq.heappop(queue)
        new = set(pairs_of(case)) - seen
        seen |= new
        ordered.append(OrderedCase(case, tuple(sorted(new))))
    return ordered


class TimedJob(NamedTuple):
    """A case to schedule."""

    slots: int
    """Number of slots of the machine that the case occupies."""
    seconds: float


def schedule_jobs(
    jobs: Sequence[TimedJob], num_slots: int, budget_seconds: float | None = None
) -> tuple[list[int], float]:
    """Schedule all jobs, the longest first, on a machine with one slot per card.

    A host has one slot: its cases share the cores. The ranks of a job that needs more slots than there
    are share all of them. With a budget, schedule the jobs that end within it, in the given order. If not
    even one fits, schedule the first.

    Returns: the numbers of the scheduled jobs, and the end of the last.
    """
    free_at = [0.0] * num_slots  # in rising order
    numbers = list(range(len(jobs)))
    if budget_seconds is None:
        numbers.sort(key=lambda number: -jobs[number].seconds)
    scheduled: list[int] = []
    for number in numbers:
        needed = min(jobs[number].slots, num_slots)
        end = free_at[needed - 1] + jobs[number].seconds
        if budget_seconds is None or end <= budget_seconds:
            free_at[:needed] = [end] * needed
            free_at.sort()
            scheduled.append(number)
    if jobs and not scheduled:
        return [0], jobs[0].seconds
    return scheduled, free_at[-1]


def parse_budget(text: str) -> float:
    """Return the seconds of a time such as "30m", "90s" or "1h30m".

    Raises: UsageError for any other text and for zero.
    """
    found = _BUDGET.fullmatch(text.strip())
    parts = found.groupdict() if found else {}
    seconds = sum(float(number) * _SECONDS[unit] for unit, number in parts.items() if number)
    if seconds <= 0:
        raise UsageError(f"--budget {text}: a time with its unit is needed, as in 30m or 1h30m")
    return seconds


class PlannedCase(Record):
    """A case that the session runs."""

    id: str
    case: Case
    reasons: list[str]
    """Why it was chosen, and why at this position."""
    new_pairs: int
    """Number of pairs of words that no earlier case has."""
    expected_seconds: float
    recorded: bool
    """True if `expected_seconds` comes from recorded runs, not from an estimate."""
    command: str
    """Command that repeats the case."""


class LeftOutCase(Record):
    """A case of the coverage that the session leaves out."""

    id: str
    case: Case
    reason: str
    expected_seconds: float
    recorded: bool
    lost_pairs: list[str]
    """Pairs of words that only left-out cases have, listed with the first of them."""


class RefusedCombination(Record):
    """A combination of words that a rule refuses."""

    rule: str
    combination: str
    reason: str
    shown_by: str
    """Test of the repository, or page."""


class PairCount(Record):
    """Numbers of pairs of words in the plan and in any case."""

    covered: int
    possible: int
    uncovered: list[str]


class SmokePlan(Record):
    """The cases of a session, the most valuable first, and the cases left out."""

    schema_: int = Field(default=SCHEMA, alias="schema")
    vendor: str
    cards: int
    machine: str
    """Kind of machine whose recorded runs count."""
    coverage: Coverage
    budget_seconds: float | None
    cases: list[PlannedCase]
    expected_seconds: float
    """Expected end of the last case."""
    pairs: PairCount
    left_out: list[LeftOutCase]
    refused: list[RefusedCombination]
    notes: list[str]


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of a plan."""

    vendor: str = HOST
    cards: int = 4
    """Largest number of cards of a case."""
    coverage: Coverage = "pairwise"
    budget_seconds: float | None = None
    expression: str | None = None
    """Expression in the syntax of `pytest -k` that selects case ids."""
    history: Path | None = None
    """File of recorded runs; None for the user's own."""
    machine: str | None = None
    """Kind of machine whose recorded runs count; None for one of the vendor, or a host like this."""


def plan_smoke(options: PlanOptions) -> SmokePlan:
    """Make the plan for `options`. No device is needed.

    Raises: UsageError for options without meaning, or that no case matches.
    """
    if options.budget_seconds is not None and options.budget_seconds <= 0:
        raise UsageError(f"--budget {options.budget_seconds:g}s: no case can run in no time")
    if options.cards < 1:
        raise UsageError(f"--cards {options.cards}: a plan needs at least one card")
    rules = rules_for(options.vendor)
    notes: list[str] = []
    durations = _read_durations(options, notes)
    cases = choose_cases(options.coverage, options.cards, rules)
    left_out: list[tuple[Case, str]] = []
    if options.expression is not None:
        cases, left_out = _match(options, cases, rules)
    ordered = order_by_value(
        cases,
        # Cases that failed recently come first, then those that never ran.
        lambda case: (durations.num_failures(case) > 0, not durations.runs_of(case)),
        durations.expected_seconds,
    )
    jobs = [TimedJob(one.case.cards, durations.expected_seconds(one.case)) for one in ordered]
    num_slots = 1 if options.vendor == HOST else options.cards
    numbers, seconds = schedule_jobs(jobs, num_slots, options.budget_seconds)
    chosen = [ordered[number] for number in sorted(numbers)]
    scheduled = {one.case for one in chosen}
    over_budget = f"over the budget of {options.budget_seconds or 0:g} s"
    left_out += [(case, over_budget) for case in cases if case not in scheduled]
    if not any(map(durations.runs_of, scheduled)):
        notes.append(
            f"all times are estimates and may be several times too short: no case has run on"
            f" {durations.machine} yet"
        )
    if options.vendor != HOST and not rules_of_vendor(options.vendor):
        notes.append(f"no limits of {options.vendor} cards are known: no rule excludes any case")
    covered = covered_pairs(one.case for one in chosen)
    possible = covered_pairs(choose_cases("pairwise", options.cards, rules))
    return SmokePlan(
        schema=SCHEMA,
        vendor=options.vendor,
        cards=options.cards,
        machine=durations.machine,
        coverage=options.coverage,
        budget_seconds=options.budget_seconds,
        cases=[_plan_case(one, durations) for one in chosen],
        expected_seconds=seconds,
        pairs=PairCount(
            covered=len(covered),
            possible=len(possible),
            uncovered=[pair_in_words(pair) for pair in sorted(possible - covered)],
        ),
        left_out=list(_describe_left_out(left_out, covered, durations)),
        refused=[
            RefusedCombination(
                rule=rule.name,
                combination=rule.describe(),
                reason=rule.reason,
                shown_by=rule.shown_by,
            )
            for rule in rules
            if any(int(number) <= options.cards for number in rule.refuses.get("cards", "1"))
        ],
        notes=notes,
    )


def _read_durations(options: PlanOptions, notes: list[str]) -> Durations:
    if options.history is not None and not options.history.is_file():
        notes.append(f"--history {options.history}: there is no such file")
    history = read_history(options.history or history_file())
    if history.problem:
        notes.append(history.problem)
    return Durations.of(history, options.machine or machine_kind(options.vendor))


def _match(
    options: PlanOptions, cases: list[Case], rules: Iterable[Rule]
) -> tuple[list[Case], list[tuple[Case, str]]]:
    """Split `cases` into those that `-k` matches and the others, each with the reason.

    Raises: UsageError if it matches none.
    """
    expression = str(options.expression)
    matches = compile_expression(expression)
    matched = [case for case in cases if matches(case.id)]
    if matched:
        return matched, [(case, f"not -k {expression!r}") for case in cases if not matches(case.id)]
    every = sum(matches(case.id) for case in choose_cases("full", options.cards, rules))
    elsewhere = (
        f"{every:,} of all compatible cases match: --coverage full"
        if every
        else "no compatible case matches"
    )
    raise UsageError(
        f"-k {expression!r}: no case of this plan (--coverage {options.coverage}) matches;"
        f" {elsewhere}"
    )


def _facts_of(case: Case, durations: Durations) -> dict[str, Any]:
    """Return the fields that planned and left-out cases share."""
    return {
        "id": case.id,
        "case": case,
        "expected_seconds": durations.expected_seconds(case),
        "recorded": bool(durations.runs_of(case)),
    }


def _plan_case(ordered: OrderedCase, durations: Durations) -> PlannedCase:
    case = ordered.case
    reasons = []
    if failures := durations.num_failures(case):
        reasons.append(f"failed in {failures} of its last {len(durations.runs_of(case))} runs")
    if not durations.runs_of(case):
        reasons.append("never ran")
    if ordered.new_pairs and not reasons:
        reasons.append("for its new pairs")
    return PlannedCase(
        reasons=reasons or ["its pairs are covered already"],
        new_pairs=len(ordered.new_pairs),
        command=f"assay smoke run {case.id}",
        **_facts_of(case, durations),
    )


def _describe_left_out(
    cases: Iterable[tuple[Case, str]], covered: set[Pair], durations: Durations
) -> Iterator[LeftOutCase]:
    """Describe each case that is left out. A lost pair is listed with the first case that has it."""
    seen = set(covered)
    for case, reason in cases:
        lost = set(pairs_of(case)) - seen
        seen |= lost
        pairs = [pair_in_words(pair) for pair in sorted(lost)]
        yield LeftOutCase(reason=reason, lost_pairs=pairs, **_facts_of(case, durations))


# --json lists all.
_CASES_SHOWN = 100
_PAIRS_SHOWN = 6

_LINE_WIDTH = 500


def print_plan(planned: SmokePlan) -> None:
    """Print the cases with reasons, the cases left out, and a summary."""
    console = open_console()
    rows = [(case, f"+{case.new_pairs}", "; ".join(case.reasons)) for case in planned.cases]
    _print_cases(console, "CASE", rows, "cases")
    if planned.left_out:
        console.print()
    rows_left = [(case, f"-{len(case.lost_pairs)}", case.reason) for case in planned.left_out]
    _print_cases(console, "LEFT OUT", rows_left, "left-out cases")
    lines = [f"note: {note}" for note in planned.notes]
    if lost_pairs := [pair for case in planned.left_out for pair in case.lost_pairs]:
        lines = [f"pairs lost: {name_some(lost_pairs, _PAIRS_SHOWN)}", *lines]
    for line in (*lines, _summary(planned)):
        console.print(line, soft_wrap=True)


def print_refused(planned: SmokePlan) -> None:
    """Print refused combinations."""
    table = new_table("REFUSED", "WHY")
    for refused in planned.refused:
        table.add_row(*map(Text, (refused.combination, refused.reason)))
    open_console().print("", table, sep="\n")


def _print_cases(
    console: Console,
    heading: str,
    rows: Sequence[tuple[PlannedCase | LeftOutCase, str, str]],
    what: str,
) -> None:
    """Print cases with pairs and reasons. Lines stay unbroken, so that ids can be copied."""
    if not rows:
        return
    table = new_table("SECONDS", "PAIRS", heading, "WHY")
    for case, pairs, why in rows[:_CASES_SHOWN]:
        seconds = f"{'' if case.recorded else '~'}{case.expected_seconds:.0f}"
        table.add_row(*map(Text, (seconds, pairs if int(pairs) else "", case.id, why)))
    needed = Measurement.get(console, console.options.update(max_width=_LINE_WIDTH), table).maximum
    open_console(width=max(needed, console.width)).print(table)
    if (rest := len(rows) - _CASES_SHOWN) > 0:
        console.print(f"and {rest:,} more {what}: --json lists all")


def _summary(planned: SmokePlan) -> str:
    sources = Counter("recorded" if case.recorded else "estimated" for case in planned.cases)
    known = ", ".join(f"{number} {source}" for source, number in sources.items())
    seconds = planned.expected_seconds
    time = f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
    return (
        f"\n{len(planned.cases):,} cases, {planned.pairs.covered} of {planned.pairs.possible} pairs of"
        f" values that can meet, about {time} on {planned.machine}"
        + (f" (times: {known})" if known else "")
    )
