"""The plan of a smoke session as JSON."""

from pydantic import Field

from assay.verdicts import SCHEMA, Record
from assay_smoke.matrix.cases import Case
from assay_smoke.matrix.coverage import Coverage


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
    """Whether `expected_seconds` comes from recorded runs, not from an estimate."""
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


class RefusedPair(Record):
    """Two words that no case has, and the rules that exclude all cases with them."""

    pair: str
    rules: list[str]


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
    refused_pairs: list[RefusedPair]
    notes: list[str]
