"""Makes the plan of a session: the cases of a coverage that a machine can run, in the order of cases.toml."""

import re
from collections.abc import Callable

from pydantic import Field
from rich.measure import Measurement
from rich.text import Text

from assay.errors import UsageError
from assay.output.console import new_table, open_console
from assay.verdicts import SCHEMA, Record
from assay_smoke.matrix.rules import (
    HOST,
    Case,
    Coverage,
    Pair,
    choose_cases,
    covered_pairs,
    pair_in_words,
    rules_for,
    rules_of_vendor,
)

Matches = Callable[[str], bool]

_TOKEN = re.compile(r"\s*([()]|[\w:+.\[\]\\/-]+)")
_END = ""


def compile_expression(text: str | None) -> Matches:
    """Return a function that tests whether an id matches `text`, as all match None. Raises: UsageError."""
    if text is None:
        return lambda _: True
    source: list[str] = []
    depth, wants_word = 0, True
    for symbol, column in _tokens(text):
        if wants_word and symbol in ("and", "or", ")", _END):
            raise _error(text, column, "a word of an id was expected")
        if not wants_word and symbol not in ("and", "or", ")" if depth else _END):
            wanted = "a closing parenthesis" if depth else "and, or, or the end"
            raise _error(text, column, f"{wanted} was expected")
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


class PlannedCase(Record):
    """A case that the session runs."""

    id: str
    case: Case
    new_pairs: int
    """Number of pairs of words that no earlier case has."""
    command: str
    """Command that repeats the case."""


class PairCount(Record):
    """Numbers of pairs of words in the plan and in any case."""

    covered: int
    possible: int
    uncovered: list[str]


class SmokePlan(Record):
    """The cases of a session, the most valuable first."""

    schema_: int = Field(default=SCHEMA, alias="schema")
    vendor: str
    cards: int
    coverage: Coverage
    cases: list[PlannedCase]
    pairs: PairCount
    notes: list[str]


def plan_smoke(
    vendor: str = HOST,
    cards: int = 4,
    coverage: Coverage = "pairwise",
    expression: str | None = None,
) -> SmokePlan:
    """Make the plan for a machine. No device is needed.

    cards: largest number of cards of a case. expression: selects case ids, in the syntax of `pytest -k`.

    Raises: UsageError for options without meaning, or that no case matches.
    """
    if cards < 1:
        raise UsageError(f"--cards {cards}: a plan needs at least one card")
    rules = rules_for(vendor)
    matches = compile_expression(expression)
    cases = [case for case in choose_cases(coverage, cards, rules) if matches(case.id)]
    if expression is not None and not cases:
        every = sum(matches(case.id) for case in choose_cases("full", cards, rules))
        elsewhere = f"{every:,} of all compatible cases match: --coverage full"
        raise UsageError(
            f"-k {expression!r}: no case of this plan (--coverage {coverage}) matches;"
            f" {elsewhere if every else 'no compatible case matches'}"
        )
    unknown = f"no limits of {vendor} cards are known: no rule excludes any case"
    covered: set[Pair] = set()
    planned = []
    for case in cases:
        new = covered_pairs([case]) - covered
        covered |= new
        command = f"assay smoke run {case.id}"
        planned.append(PlannedCase(id=case.id, case=case, new_pairs=len(new), command=command))
    possible = covered_pairs(choose_cases("pairwise", cards, rules))
    return SmokePlan(
        schema=SCHEMA,
        vendor=vendor,
        cards=cards,
        coverage=coverage,
        cases=planned,
        pairs=PairCount(
            covered=len(covered),
            possible=len(possible),
            uncovered=[pair_in_words(pair) for pair in sorted(possible - covered)],
        ),
        notes=[] if vendor == HOST or rules_of_vendor(vendor) else [unknown],
    )


# --json lists all.
_CASES_SHOWN = 100

_LINE_WIDTH = 500


def print_plan(planned: SmokePlan) -> None:
    """Print the cases and a summary. Lines stay unbroken, so that ids can be copied."""
    console = open_console()
    table = new_table("PAIRS", "CASE")
    for case in planned.cases[:_CASES_SHOWN]:
        table.add_row(f"+{case.new_pairs}" if case.new_pairs else "", Text(case.id))
    needed = Measurement.get(console, console.options.update(max_width=_LINE_WIDTH), table).maximum
    open_console(width=max(needed, console.width)).print(table)
    if (rest := len(planned.cases) - _CASES_SHOWN) > 0:
        console.print(f"and {rest:,} more cases: --json lists all")
    summary = (
        f"\n{len(planned.cases):,} cases, {planned.pairs.covered} of {planned.pairs.possible} pairs of"
        " values that can meet"
    )
    for line in (*(f"note: {note}" for note in planned.notes), summary):
        console.print(line, soft_wrap=True)
