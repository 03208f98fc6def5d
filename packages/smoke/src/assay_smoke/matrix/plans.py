"""What a plan of the smoke tier is, as data."""

from pydantic import Field

from assay.verdicts import SCHEMA, Record
from assay_smoke.matrix.cases import Case
from assay_smoke.matrix.coverage import Coverage


class PlannedCase(Record):
    """A case that is to be run.

    reasons: why it was chosen, and why at its place.
    new_pairs: how many pairs of words it has that no case before it has.
    expected_seconds: from recorded runs on such a machine where `recorded`, else an estimate.
    command: what repeats it.
    """

    id: str
    case: Case
    reasons: list[str]
    new_pairs: int
    expected_seconds: float
    recorded: bool
    command: str


class LeftOutCase(Record):
    """A case of the coverage that is not to be run.

    lost_pairs: the pairs of words that are lost by it; one that several have stands with the first.
    """

    id: str
    case: Case
    reason: str
    expected_seconds: float
    recorded: bool
    lost_pairs: list[str]


class RefusedCombination(Record):
    """Words that cannot stand together; shown_by: a test of the repository, or a page."""

    rule: str
    combination: str
    reason: str
    shown_by: str


class RefusedPair(Record):
    """Two words that no case has, and the rules that together leave none."""

    pair: str
    rules: list[str]


class PairCount(Record):
    """Pairs of words that the cases of the plan have, of those that any case can have."""

    covered: int
    possible: int
    uncovered: list[str]


class SmokePlan(Record):
    """Which cases are run, in which order, and what is not.

    machine: the kind of machine whose recorded runs count.
    cases: the most valuable first.
    expected_seconds: until the last case ends.
    """

    schema_: int = Field(default=SCHEMA, alias="schema")
    vendor: str
    cards: int
    machine: str
    coverage: Coverage
    budget_seconds: float | None
    cases: list[PlannedCase]
    expected_seconds: float
    pairs: PairCount
    left_out: list[LeftOutCase]
    refused: list[RefusedCombination]
    refused_pairs: list[RefusedPair]
    notes: list[str]
