"""What there is to judge of `assay check train --overfit`, and the target that is held up.

Nothing here is tuned: the target is the loss that the trusted device reaches on the same sequences
in as many steps, and the trajectory before rounding errors have grown is compared with the noise run's.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median

from assay.comparing.coverage import CoverageParts, judge_coverage
from assay.comparing.limits import Limits
from assay.dtypes import float_format
from assay.noise import TENSOR_FLOOR
from assay.training.judging.free_run import relative_error_of_losses
from assay.training.overfit.memorization import LABELS
from assay.training.overfit.requests import Curve, Memorization, OverfitCandidate, OverfitReference
from assay.verdicts import Coverage, Measurement

LEVEL = "overfit"

# Below this the right token is on average, as a geometric mean, likelier than all others together.
MEMORIZED = math.log(2)

# Of the first loss: what counts as memorized was not known before.
_SHARE_OF_FIRST = 1 / 4

# Of the steps, at the end: what a curve has reached is read over them.
_LAST_SHARE = 1 / 5

# The candidate may take twice the reference's steps for the same: on a plateau, correct runs whose
# sums are rounded in another order end several percent apart.
_TARGET_SHARE = 1 / 2

# Losses that are compared one by one. Later, rounding errors have grown into another trajectory. The
# limits of loss-error are calibrated on as many.
NUM_FIRST = 3


@dataclass(frozen=True)
class OverfitEvidence:
    """What there is to judge; without candidates there is a reference that has not memorized the sequences.

    candidates: of each rank, by rank.
    allow_unused: GLOBs of parts that may stay uncompared.
    """

    dtype: str
    lora: bool
    reference: OverfitReference
    limits: Limits
    candidates: list[OverfitCandidate] = field(default_factory=list)
    memorization: Memorization | None = None
    allow_unused: tuple[str, ...] = ()

    @cached_property
    def coverage(self) -> Coverage:
        """Judge how much of the model predicting the sequences uses. The candidate is not watched."""
        return judge_coverage(CoverageParts(self.reference.usage, None, allowed=self.allow_unused))

    @cached_property
    def reached(self) -> float:
        """The loss at which yardstick and noise run end, the higher one."""
        curves = (self.reference.yardstick, self.reference.noise)
        return _worst(typical(last_part(curve.losses)) for curve in curves)

    @cached_property
    def target(self) -> float:
        """The highest loss of yardstick and noise run in the second half of their steps.

        But no more than the middle, by ratios, between the first loss and what they reach.
        """
        curves = (self.reference.yardstick.losses, self.reference.noise.losses)
        late = _worst(loss for losses in curves for loss in last_part(losses, _TARGET_SHARE))
        return min(late, math.sqrt(self.first * self.reached))

    @property
    def first(self) -> float:
        """The reference's loss before any step."""
        return self.reference.yardstick.losses[0]

    @property
    def curve(self) -> Curve:
        """The candidate's."""
        return self.candidates[0].curve

    @cached_property
    def start(self) -> Measurement:
        """The first losses, which no rounding error has moved far yet."""
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
        """The last losses beside the target."""
        return _against_target("overfit-loss", typical(last_part(self.curve.losses)), self.target)

    @cached_property
    def memorized(self) -> Measurement | None:
        """The loss of the trained weights on the labels; a last step may be as bad as others of its end."""
        if self.memorization is None or not self.memorization.nats:
            return None
        allowed = max(self.target, _worst(last_part(self.curve.losses)))
        return _against_target("overfit-memorization", self.memorization.nats[LABELS], allowed)


def last_part(losses: list[float], share: float = _LAST_SHARE) -> list[float]:
    """The losses at the end of a curve."""
    return losses[-max(1, round(share * len(losses))) :]


def why_not_overfit(evidence: OverfitEvidence) -> str | None:
    """Why the reference gives no target; None if it does."""
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


def _worst(losses: Iterable[float]) -> float:
    """The highest; NaN if any is."""
    known = list(losses)
    return math.nan if any(map(math.isnan, known)) else max(known)


def typical(losses: list[float]) -> float:
    """The median; NaN if any is."""
    return math.nan if any(map(math.isnan, losses)) else median(losses)
