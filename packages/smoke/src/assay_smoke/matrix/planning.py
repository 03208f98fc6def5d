"""Makes the plan of a session, written as JSON, from the matrix, recorded runs and the user's options."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from assay.errors import UsageError
from assay.verdicts import SCHEMA, Record
from assay_smoke.matrix.cases import Case
from assay_smoke.matrix.coverage import (
    Coverage,
    Pair,
    choose_cases,
    covered_pairs,
    pair_in_words,
    pairs_of,
)
from assay_smoke.matrix.durations import Durations, history_file, machine_kind, read_history
from assay_smoke.matrix.expressions import compile_expression
from assay_smoke.matrix.ordering import OrderedCase, TimedJob, order_by_value, schedule_jobs
from assay_smoke.matrix.rules import HOST, Rule, rules_for, rules_of_vendor


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
    ordered = order_by_value(cases, _urgency(durations), durations.expected_seconds)
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
        cases=[_planned(one, durations) for one in chosen],
        expected_seconds=seconds,
        pairs=PairCount(
            covered=len(covered),
            possible=len(possible),
            uncovered=[pair_in_words(pair) for pair in sorted(possible - covered)],
        ),
        left_out=list(_left_out(left_out, covered, durations)),
        refused=[_refused(rule) for rule in rules if _applies_within(rule, options.cards)],
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


def _urgency(durations: Durations) -> Callable[[Case], tuple[bool, ...]]:
    """Return a sort key, largest first: failed recently, then never ran."""
    return lambda case: (durations.num_failures(case) > 0, not durations.runs_of(case))


def _planned(ordered: OrderedCase, durations: Durations) -> PlannedCase:
    case = ordered.case
    reasons = []
    if failures := durations.num_failures(case):
        reasons.append(f"failed in {failures} of its last {len(durations.runs_of(case))} runs")
    if not durations.runs_of(case):
        reasons.append("never ran")
    if ordered.new_pairs and not reasons:
        reasons.append("for its new pairs")
    return PlannedCase(
        id=case.id,
        case=case,
        reasons=reasons or ["its pairs are covered already"],
        new_pairs=len(ordered.new_pairs),
        expected_seconds=durations.expected_seconds(case),
        recorded=bool(durations.runs_of(case)),
        command=f"assay smoke run {case.id}",
    )


def _left_out(
    cases: Iterable[tuple[Case, str]], covered: set[Pair], durations: Durations
) -> Iterator[LeftOutCase]:
    """Describe each case that is left out. A lost pair is listed with the first case that has it."""
    seen = set(covered)
    for case, reason in cases:
        lost = set(pairs_of(case)) - seen
        seen |= lost
        yield LeftOutCase(
            id=case.id,
            case=case,
            reason=reason,
            expected_seconds=durations.expected_seconds(case),
            recorded=bool(durations.runs_of(case)),
            lost_pairs=[pair_in_words(pair) for pair in sorted(lost)],
        )


def _applies_within(rule: Rule, cards: int) -> bool:
    """Return whether the rule refuses a case that uses at most `cards` cards."""
    return any(int(number) <= cards for number in rule.refuses.get("cards", "1"))


def _refused(rule: Rule) -> RefusedCombination:
    return RefusedCombination(
        rule=rule.name,
        combination=rule.describe(),
        reason=rule.reason,
        shown_by=rule.shown_by,
    )
