"""Outcomes of comparisons that can be short of data."""

from collections.abc import Iterable
from enum import StrEnum

from assay.verdicts import Outcome


class PairedOutcome(StrEnum):
    """The outcome of a paired comparison."""

    PASS = "PASS"  # noqa: S105 - an outcome, not a password
    UNDERPOWERED = "UNDERPOWERED"
    NOT_COMPARED = "NOT_COMPARED"
    FAIL = "FAIL"

    @property
    def as_verdict(self) -> Outcome:
        """Return the outcome of verdict.json, which has no UNDERPOWERED."""
        return Outcome.NOT_COMPARED if self is PairedOutcome.UNDERPOWERED else Outcome(self.value)

    @classmethod
    def worst(cls, outcomes: Iterable["PairedOutcome"]) -> "PairedOutcome":
        """Return the outcome that comes last in the order of the members."""
        return max(outcomes, key=list(cls).index)
