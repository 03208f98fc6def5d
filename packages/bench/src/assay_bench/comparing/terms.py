"""What is asked of a candidate."""

from typing import Annotated

from pydantic import Field

from assay.verdicts import Record

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Terms(Record):
    """Which drop is too much, and how sure a comparison has to be.

    accuracy: the drop that is too much, as a share of the items; log_probability: in nats a byte.
    movement: by how much right answers' log-probabilities may differ, up or down, as a root mean square in
        nats a byte; None where the candidate need not be the same model, only as good. Of other weights it
        is asked only on the same machine with the same torch: elsewhere the same training gives other ones.
    significance: the chance of a false alarm in the whole comparison; and of a false pass of a measure
        whose true drop is the margin. power: of the number of items that is told to suffice.
    """

    accuracy: _Positive = 0.02
    log_probability: _Positive = 0.01
    movement: _Positive | None = None
    significance: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    power: Annotated[float, Field(gt=0.5, lt=1)] = 0.9
