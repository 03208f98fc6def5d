"""The statistics of verdicts and measurements, one entry each. `assay.noise` computes those of stages."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

# Statistics that decide verdicts.
Statistic = Literal[
    "non-finite", "exact",
    "replay-tensor", "replay-row", "replay-slope", "replay-bins", "replay-channel",
    "replay-row-slope", "replay-share", "replay-choice",
    "logits-kl", "logits-kl-worst", "logits-error", "logits-worst", "logits-whole",
    "output-error", "output-worst", "output-whole", "loss-error",
    "trajectory-error", "accumulated", "norm-error",
    "cosine-distance", "kl-divergence",
]  # fmt: skip

# Ratio / limit up to which another rounding can explain an error that a healthy run of this environment shares.
# Correct sums outside of the calibration reached 1.9 (scores of 8 experts from partial sums in bfloat16: 9.4 with
# a limit of 5.0), the weakest of 73 faults planted in float32 4.6 (a ratio of 16 with a limit of 3.5).
MOST_ROUNDING = 3.0


@dataclass(frozen=True, slots=True)
class StatisticEntry:
    """The wording of one statistic, and how it is judged."""

    words: str
    """Name of the value in a sentence."""
    judged_by: Literal["noise", "zero", "metric", "target", "nothing"] = "noise"
    """The error of the noise run, exact equality, a limit of its own, a training target."""
    limit_of: Statistic | None = None
    """The statistic whose limit applies unless this one has a limit: a new one borrows its first limit."""
    of_stages: bool = False
    """It compares the sums of a replayed stage; `assay.noise` computes it for every port."""
    is_systematic: bool = False
    """The error is small in every row: the first wrong token is not searched by its limit."""
    is_general: bool = False
    """It sees an error of any form: the first one states a verdict's resolution, and single training steps
    are held to its limit."""
    failure: str = ""
    """Description of a failure that has no ratio, if `words` does not describe it."""
    at_zero: str = ""
    """Description of a value of zero, if `words` with a number does not describe it."""


# Of several statistics over their limits at one stage, the first in this order is reported: the
# easiest one to read.
STATISTICS: dict[str, StatisticEntry] = {
    "non-finite": StatisticEntry(
        "NaN or infinity where the reference is finite", "zero", at_zero="every value is finite"
    ),
    "exact": StatisticEntry(
        "share of unequal values",
        "zero",
        failure="values that must be equal (integers, indices, masks) differ",
        at_zero="every value is equal",
    ),
    "replay-tensor": StatisticEntry("relative error", of_stages=True, is_general=True),
    "replay-row": StatisticEntry(
        "relative error of the worst row", of_stages=True, is_general=True
    ),
    "replay-slope": StatisticEntry("systematic scale error", of_stages=True, is_systematic=True),
    "replay-bins": StatisticEntry(
        "systematic error by size of the value", of_stages=True, is_systematic=True
    ),
    "replay-channel": StatisticEntry(
        "systematic error of the worst channel", of_stages=True, is_systematic=True
    ),
    "replay-row-slope": StatisticEntry(
        "scale error of single rows", of_stages=True, is_systematic=True
    ),
    "replay-share": StatisticEntry(
        "share of wrongly rounded elements", of_stages=True, is_systematic=True
    ),
    "replay-choice": StatisticEntry(
        "share of other choices between nearly equal scores", limit_of="replay-tensor"
    ),
    "logits-kl": StatisticEntry("mean KL divergence"),
    "logits-kl-worst": StatisticEntry("KL divergence of the worst token"),
    "logits-error": StatisticEntry("relative error of the logits", is_general=True),
    "logits-worst": StatisticEntry("relative error of the worst token's logits", is_general=True),
    "logits-whole": StatisticEntry("relative error over the whole vocabulary", is_general=True),
    "output-error": StatisticEntry(
        "relative error of an output", limit_of="logits-error", is_general=True
    ),
    "output-worst": StatisticEntry(
        "relative error of the worst row of an output", limit_of="logits-worst", is_general=True
    ),
    "output-whole": StatisticEntry(
        "relative error over all values of the outputs", is_general=True
    ),
    "loss-error": StatisticEntry("relative error of the losses", is_general=True),
    "trajectory-error": StatisticEntry(
        "median distance of a trained parameter from the reference's"
    ),
    # An error that was carried on grows with the noise.
    "accumulated": StatisticEntry(
        "accumulated relative error", limit_of="replay-tensor", is_general=True
    ),
    # Two norms differ by no more than the norm of the difference.
    "norm-error": StatisticEntry("relative difference of the norms", limit_of="replay-tensor"),
    "cosine-distance": StatisticEntry("cosine distance", "metric"),
    "kl-divergence": StatisticEntry("KL divergence of the worst row", "metric"),
    "overfit-loss": StatisticEntry("loss of the last steps", "target"),
    "overfit-memorization": StatisticEntry(
        "loss that the trained weights have on the trusted device", "target"
    ),
    "token": StatisticEntry("relative error of the row", "nothing"),
    "kl": StatisticEntry("KL divergence of the token", "nothing"),
    "top1-agreement": StatisticEntry("agreement of the most likely token", "nothing"),
    "max-abs": StatisticEntry("largest absolute difference of logits", "nothing"),
    "first-difference": StatisticEntry("logit gap where the tokens first differ"),
}

# They compare integers, and have no error of a row.
OF_INTEGERS = frozenset({"exact", "replay-choice"})

# Values of each training step, drawn next to those of the trusted run and not judged.
CURVES = {"loss": "loss", "grad-norm": "gradient norm", "learning-rate": "learning rate"}
CURVE_SIDES = {
    "candidate": "candidate",
    "yardstick": "exact reference",
    "uninterrupted": "uninterrupted",
    "split": "other split",
    "noise": "noise run",
    "repeated": "repeated",
    "resumed": "resumed",
}
STATISTICS |= {
    f"{side}-{curve}": StatisticEntry(f"{words} of a step ({run})", "nothing")
    for side, run in CURVE_SIDES.items()
    for curve, words in CURVES.items()
}

# The statistic of single tokens, which is never judged: rows of clean runs reach a ratio of 20.
TOKEN_STATISTIC = "token"  # noqa: S105 - not a password

METRICS = frozenset(name for name, entry in STATISTICS.items() if entry.judged_by == "metric")
OF_STAGES: frozenset[Statistic] = frozenset(
    name for name in get_args(Statistic) if STATISTICS[name].of_stages
)
SYSTEMATIC: frozenset[Statistic] = frozenset(
    name for name in get_args(Statistic) if STATISTICS[name].is_systematic
)
# The most telling first.
GENERAL = tuple(name for name, entry in STATISTICS.items() if entry.is_general)


def worst_error(errors: Iterable[float]) -> float:
    """Return the largest error; 0 without any, NaN if one is NaN. `max` ignores a NaN that is not first."""
    known = list(errors)
    return math.nan if any(map(math.isnan, known)) else max(known, default=0.0)
