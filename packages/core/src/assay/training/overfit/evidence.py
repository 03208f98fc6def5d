"""The evidence of `assay check train --overfit`, and the target loss derived from the reference.

The target is the loss that the trusted device reaches on the same sequences in as many steps. The
first losses, before rounding errors grow, are compared with the noise run's.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median

from assay.comparing.coverage import CoverageParts, judge_coverage
from assay.comparing.limits import Limits
from assay.dtypes import float_format
from assay.noise import TENSOR_FLOOR
from assay.statistics import worst_error
from assay.training.judging.free_run import relative_error_of_losses
from assay.training.overfit.memorization import LABELS
from assay.training.overfit.requests import (
    LossCurve,
    Memorization,
    OverfitCandidate,
    OverfitReference,
)
from assay.verdicts import Coverage, Measurement

LEVEL = "overfit"

# Below this loss the right token is likelier than all others together, as a geometric mean.
MEMORIZED = math.log(2)

# A memorized sequence must have at most this share of the first loss: it was not known before.
_SHARE_OF_FIRST = 1 / 4

# The final loss of a curve is the median over this share of its steps.
_LAST_SHARE = 1 / 5

# The candidate may need twice the reference's steps for the same loss: on a plateau, correct runs
# with other orders of summation end several percent apart.
_TARGET_SHARE = 1 / 2

# Number of losses compared one by one. Later, rounding errors have grown into another trajectory. The
# limits of loss-error are calibrated on as many losses.
NUM_FIRST = 3


@dataclass(frozen=True)
class OverfitEvidence:
    """The evidence of both sides."""

    dtype: str
    lora: bool
    reference: OverfitReference
    limits: Limits
    candidates: list[OverfitCandidate] = field(default_factory=list)
    """One for each rank; empty if the reference has not memorized the sequences."""
    memorization: Memorization | None = None
    allow_unused: tuple[str, ...] = ()
    """GLOBs of parts that may stay uncompared."""

    @cached_property
    def coverage(self) -> Coverage:
        """Judge how much of the model is used to predict the sequences, on the reference's side."""
        return judge_coverage(CoverageParts(self.reference.usage, None, allowed=self.allow_unused))

    @cached_property
    def reached(self) -> float:
        """Return the higher of the final losses of yardstick and noise run."""
        curves = (self.reference.yardstick, self.reference.noise)
        return worst_error(typical(last_part(curve.losses)) for curve in curves)

    @cached_property
    def target(self) -> float:
        """Return the highest loss of yardstick and noise run in the second half of their steps.

        It is at most the geometric mean of the first and the reached loss.
        """
        curves = (self.reference.yardstick.losses, self.reference.noise.losses)
        late = worst_error(loss for losses in curves for loss in last_part(losses, _TARGET_SHARE))
        return min(late, math.sqrt(self.first * self.reached))

    @property
    def first(self) -> float:
        """The reference's loss before any step."""
        return self.reference.yardstick.losses[0]

    @property
    def curve(self) -> LossCurve:
        """The candidate's curve."""
        return self.candidates[0].curve

    @cached_property
    def start(self) -> Measurement:
        """Measure the first losses, before rounding errors grow."""
        expected = self.reference.yardstick.losses[:NUM_FIRST]
        actual = relative_error_of_losses(self.curve.losses[:NUM_FIRST], expected)
        noise = relative_error_of_losses(self.reference.noise.losses[:NUM_FIRST], expected)
        floor = TENSOR_FLOOR * float_format(self.dtype).unit_roundoff
        return Measurement(
            level=LEVEL,
            module="",
            port="loss",
            statistic="loss-error",
            actual=actual,
            expected=noise,
            ratio=actual / max(noise, floor),
            limit=self.limits.of("loss-error"),
        )

    @cached_property
    def end(self) -> Measurement:
        """Measure the final loss against the target."""
        return _against_target("overfit-loss", typical(last_part(self.curve.losses)), self.target)

    @cached_property
    def memorized(self) -> Measurement | None:
        """Measure the loss of the trained weights on the labels.

        The last step may be as bad as any step near the end.
        """
        if self.memorization is None or not self.memorization.nats:
            return None
        allowed = max(self.target, worst_error(last_part(self.curve.losses)))
        return _against_target("overfit-memorization", self.memorization.nats[LABELS], allowed)


def last_part(losses: list[float], share: float = _LAST_SHARE) -> list[float]:
    """Return the losses at the end of a curve."""
    return losses[-max(1, round(share * len(losses))) :]


def why_not_overfit(evidence: OverfitEvidence) -> str | None:
    """Explain why the reference provides no target; None if it does."""
    reached, first = evidence.reached, evidence.first
    steps = len(evidence.reference.yardstick.losses)
    if not math.isfinite(reached):
        return f"the noise run itself has a loss of {reached}: there is no target"
    allowed = min(MEMORIZED, _SHARE_OF_FIRST * first)
    if reached > allowed:
        return (
            f"in {steps} steps the reference itself gets from {first:.3g} to {reached:.3g} nats per"
            f" label token, and not below {allowed:.3g}: there is no target; more --overfit-steps"
            " or another --learning-rate may give one"
        )
    return None


def _against_target(statistic: str, actual: float, target: float) -> Measurement:
    return Measurement(
        level=LEVEL,
        module="",
        port="loss",
        phase="optimizer",
        statistic=statistic,
        actual=actual,
        expected=target,
        ratio=actual / target,
        limit=1.0,
    )


def typical(losses: list[float]) -> float:
    """Return the median; NaN if any loss is NaN."""
    return math.nan if any(map(math.isnan, losses)) else median(losses)
