"""Margins and significance of a comparison."""

from typing import Annotated

from pydantic import Field

from assay.verdicts import Record

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
