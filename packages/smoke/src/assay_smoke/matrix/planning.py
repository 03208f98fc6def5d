"""Makes the plan of a session from the matrix, recorded runs, and what the user asks for."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from assay.errors import UsageError
from assay.verdicts import SCHEMA
from assay_smoke.matrix.axes import axes_for, case_with, values_of
from assay_smoke.matrix.cases import Case
from assay_smoke.matrix.choosing.changes import Changes
from assay_smoke.matrix.choosing.expressions import compile_expression
from assay_smoke.matrix.choosing.schedules import Job, Machine, share_out, share_out_within
from assay_smoke.matrix.choosing.values import ValuedCase, by_value
from assay_smoke.matrix.coverage import Coverage, choose_cases, covered_pairs
from assay_smoke.matrix.durations import (
    Durations,
    History,
    history_file,
    machine_kind,
    read_history,
)
from assay_smoke.matrix.plans import (
    LeftOutCase,
    PairCount,
    PlannedCase,
    RefusedCombination,
    RefusedPair,
    SmokePlan,
)
from assay_smoke.matrix.search import Matrix, Pair, pair_in_words, pairs_of
from assay_smoke.matrix.vendors import HOST, rules_for, rules_of_vendor


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What a plan is asked for.

    cards: the largest number that a case may use.
    budget_seconds: for each shard; None: no limit.
    shard: from 1; None: the plan of all shards.
    files: what changed, from the root of the repository; None: anything may have.
    expression: as `pytest -k` has it, for ids.
    history: file of recorded runs; None: the user's, and with several shards none.
    machine: whose records count; None: those of the vendor, or of a host like this one.
    """

    vendor: str = HOST
    cards: int = 4
    coverage: Coverage = "pairwise"
    budget_seconds: float | None = None
    shards: int = 1
    shard: int | None = None
    files: tuple[str, ...] | None = None
    expression: str | None = None
    history: Path | None = None
    machine: str | None = None

    def check_consistency(self) -> None:
        """Raise UsageError for what means nothing."""
        if self.shards < 1:
            raise UsageError(f"--shards {self.shards}: there is at least one")
        if self.shard is not None and not 1 <= self.shard <= self.shards:
            raise UsageError(f"--shard {self.shard}: shards are 1 to {self.shards} (--shards)")
        if self.budget_seconds is not None and self.budget_seconds <= 0:
            raise UsageError(f"--budget {self.budget_seconds:g}s: nothing can be run in no time")


def plan_smoke(options: PlanOptions) -> SmokePlan:
    """The plan for `options`; no device is needed.

    Raises: UsageError for options that mean nothing, or that no case fits.
    """
    options.check_consistency()
    matrix = _matrix(options.vendor, options.cards)
    notes: list[str] = []
    durations = _read_durations(options, notes)
    selection = _Selection(
        [case_with(words) for words in choose_cases(matrix, options.coverage)], []
    )
    changes = None if options.files is None else Changes.of(options.files)
    if changes is not None:
        selection.keep(lambda case: case.framework in changes.frameworks, "not touched")
        notes += changes.reasons or ("nothing changed",)
        if not changes.frameworks:
            notes.append("what changed touches no case: nothing is selected")
    if options.expression is not None:
        _match(options.expression, selection, matrix, options.coverage)
    ordered = by_value(selection.cases, _urgency(changes, durations), durations.expected_seconds)
    sharing = _share_out(ordered, options, durations)
    chosen = [valued for valued in ordered if valued.case in sharing.shards]
    shown = [valued for valued in chosen if sharing.is_shown(valued.case)]
    if len(shown) < len(chosen):
        notes.append(
            f"together the {options.shards} shards have {len(chosen)} cases, which cover"
            f" {len(_pairs(chosen))} of {len(matrix.pairs)} pairs"
        )
    left_out = [
        *selection.left,
        *((case, _over_budget(options)) for case in selection.cases if case not in sharing.shards),
    ]
    if shown and not any(map(durations.is_recorded, (valued.case for valued in shown))):
        notes.append(
            f"all times are estimates, of which some are a few times too short: no case has run on"
            f" {durations.machine} yet"
        )
    if options.vendor != HOST and not rules_of_vendor(options.vendor):
        notes.append(
            f"nothing is known that cards of {options.vendor} lack: no rule leaves anything out"
        )
    covered = _pairs(shown)
    return SmokePlan(
        schema=SCHEMA,
        vendor=options.vendor,
        cards=options.cards,
        machine=durations.machine,
        coverage=options.coverage,
        budget_seconds=options.budget_seconds,
        shards=options.shards,
        shard=options.shard,
        digest=_digest(options, sharing.shards),
        cases=[_planned(valued, sharing, changes, durations) for valued in shown],
        expected_seconds=sharing.seconds,
        pairs=PairCount(
            covered=len(covered),
            possible=len(matrix.pairs),
            uncovered=[pair_in_words(pair) for pair in sorted(matrix.pairs - covered)],
        ),
        left_out=list(_left_out(left_out, _pairs(chosen), durations)),
        refused=_refused_combinations(matrix),
        refused_pairs=[
            RefusedPair(pair=pair_in_words(pair), rules=[rule.name for rule in rules])
            for pair, rules in matrix.refused_pairs.items()
        ],
        notes=notes,
    )


@cache
def _matrix(vendor: str, cards: int) -> Matrix:
    return Matrix(axes_for(cards), rules_for(vendor))


@dataclass(slots=True)
class _Selection:
    """Cases that are still to be run, and those that are left out, each with the reason."""

    cases: list[Case]
    left: list[tuple[Case, str]]

    def keep(self, matches: Callable[[Case], bool], reason: str) -> None:
        """Leave out what does not match."""
        self.left += [(case, reason) for case in self.cases if not matches(case)]
        self.cases = [case for case in self.cases if matches(case)]


@dataclass(frozen=True, slots=True)
class _Sharing:
    """Which shard each chosen case is in, from 1; the one to show, or None; how long it takes."""

    shards: Mapping[Case, int]
    shown: int | None
    seconds: float

    def is_shown(self, case: Case) -> bool:
        """Whether `case` is in the shard that is asked for."""
        return self.shown is None or self.shards[case] == self.shown


def _read_durations(options: PlanOptions, notes: list[str]) -> Durations:
    """What is recorded, or nothing where shards have to be the same on machines with other records."""
    machine = options.machine or machine_kind(options.vendor)
    if options.history is None and options.shards > 1:
        notes.append(
            "durations are estimates: shards on several machines are parts of one plan only where"
            " all use the same records; --history FILE names them"
        )
        return Durations.of(History(schema=SCHEMA), machine)
    if options.history is not None and not options.history.is_file():
        notes.append(f"--history {options.history} is not there")
    history = read_history(options.history or history_file())
    if history.problem:
        notes.append(history.problem)
    return Durations.of(history, machine)


def _match(expression: str, selection: _Selection, matrix: Matrix, coverage: Coverage) -> None:
    """Leave out what `expression` does not match. Raises: UsageError if nothing is left by it."""
    matches = compile_expression(expression)
    had_cases = bool(selection.cases)
    selection.keep(lambda case: matches(case.id), f"not -k {expression!r}")
    if selection.cases or not had_cases:
        return
    every = sum(matches(case_with(words).id) for words in matrix.cases())
    elsewhere = (
        f"{every:,} of all compatible cases have: --coverage full"
        if every and coverage != "full"
        else "no compatible case has"
    )
    raise UsageError(
        f"-k {expression!r}: no case of this plan (--coverage {coverage}) has such an id;"
        f" {elsewhere}"
    )


def _urgency(changes: Changes | None, durations: Durations) -> Callable[[Case], tuple[bool, ...]]:
    """The largest first: touched by what changed, failed lately, never ran."""

    def urgency(case: Case) -> tuple[bool, ...]:
        touched = changes is not None and case.framework in changes.named
        return touched, durations.num_failures(case) > 0, not durations.is_recorded(case)

    return urgency


def _share_out(
    ordered: Sequence[ValuedCase], options: PlanOptions, durations: Durations
) -> _Sharing:
    # On a host cases share the cores, so that they run one after the other.
    num_slots = 1 if options.vendor == HOST else options.cards
    machines: list[Machine[Case]] = [Machine(num_slots) for _ in range(options.shards)]
    jobs = [
        Job(valued.case, valued.case.cards, durations.expected_seconds(valued.case))
        for valued in ordered
    ]
    if options.budget_seconds is None:
        share_out(jobs, machines)
    else:
        share_out_within(options.budget_seconds, jobs, machines)
    shards = {job.item: number for number, one in enumerate(machines, 1) for job in one.jobs}
    seconds = [
        machine.seconds
        for number, machine in enumerate(machines, 1)
        if options.shard in (None, number)
    ]
    return _Sharing(shards, options.shard, max(seconds))


def _planned(
    valued: ValuedCase, sharing: _Sharing, changes: Changes | None, durations: Durations
) -> PlannedCase:
    case = valued.case
    reasons = []
    if changes is not None:
        named = case.framework in changes.named
        reasons.append("touched by what changed" if named else "may be touched by what changed")
    if failures := durations.num_failures(case):
        reasons.append(f"failed in {failures} of its last {durations.num_runs(case)} runs")
    if not durations.is_recorded(case):
        reasons.append("never ran")
    if valued.new_pairs and not reasons:
        reasons.append("for its new pairs")
    return PlannedCase(
        id=case.id,
        case=case,
        reasons=reasons or ["its pairs are covered already"],
        new_pairs=len(valued.new_pairs),
        expected_seconds=durations.expected_seconds(case),
        recorded=durations.is_recorded(case),
        shard=sharing.shards[case],
        command=f"assay smoke run {case.id}",
    )


def _left_out(
    cases: Iterable[tuple[Case, str]], covered: set[Pair], durations: Durations
) -> Iterator[LeftOutCase]:
    """Each case that is left out; a pair that is lost stands with the first that has it."""
    seen = set(covered)
    for case, reason in cases:
        lost = set(pairs_of(values_of(case))) - seen
        seen |= lost
        yield LeftOutCase(
            id=case.id,
            case=case,
            reason=reason,
            expected_seconds=durations.expected_seconds(case),
            recorded=durations.is_recorded(case),
            lost_pairs=[pair_in_words(pair) for pair in sorted(lost)],
        )


def _refused_combinations(matrix: Matrix) -> list[RefusedCombination]:
    """The rules that refuse anything on these axes."""
    words = {axis.name: {*axis.values} for axis in matrix.axes}
    return [
        RefusedCombination(
            rule=rule.name,
            combination=rule.describe(),
            reason=rule.reason,
            shown_by=rule.shown_by,
        )
        for rule in matrix.rules
        if all(words[axis] & refused for axis, refused in rule.refuses.items())
    ]


def _over_budget(options: PlanOptions) -> str:
    return f"over the budget of {options.budget_seconds or 0:g} s"


def _pairs(cases: Iterable[ValuedCase]) -> set[Pair]:
    return covered_pairs(values_of(valued.case) for valued in cases)


def _digest(options: PlanOptions, shards: Mapping[Case, int]) -> str:
    named = sorted(f"{case.id} {shard}" for case, shard in shards.items())
    return hashlib.sha256("\n".join([options.vendor, *named]).encode()).hexdigest()[:12]
