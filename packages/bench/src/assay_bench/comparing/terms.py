"""Margins and significance of a comparison, and its outcomes, which can be short of data."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from assay.verdicts import Outcome, Record


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


_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Terms(Record):
    """The largest acceptable drops of a candidate, and the error rates of the comparison."""

    accuracy: _Positive = 0.02
    """Drop in accuracy, as a share of the items."""
    log_probability: _Positive = 0.01
    """Drop in the log-probability of right answers, in nats per byte."""
    movement: _Positive | None = None
    """Root mean square change of right answers' log-probabilities, in nats per byte.

    None: the candidate may be another model that is as good. Retrained weights are judged only on the
    same machine with the same torch, because the same training gives other weights elsewhere.
    """
    significance: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    """Chance of a false FAIL of the whole comparison, and of a false PASS of one measure at its margin."""
    power: Annotated[float, Field(gt=0.5, lt=1)] = 0.9
    """Chance of a PASS for an equally good candidate with the reported number of items."""
