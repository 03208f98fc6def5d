"""The factor by which a trainer scales its loss, and all gradients until a later phase removes it.

GradScaler multiplies the loss by 65536 and divides the gradients before they are clipped. A loss times the
number of ranks is divided by averaging the gradients. In between, gradients are the reference's times
one factor.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import median

from torch import Tensor

from assay.sites import CallSite, Phase

# Largest error that remains in a gradient of the right direction after scaling, relative to the change
# by the scale. One wrong element in a thousand leaves 3%.
PARALLEL = 0.02

# Rounding moves the mean of many elements by less than one unit; four units have another cause.
UNITS_OF_NOISE = 4


@dataclass(frozen=True, slots=True)
class GradientScale:
    """The length of the loss's first gradient over the reference's, in one backward pass."""

    step: int
    micro_batch: int
    slope: float
    """Slope of the error on the expected value."""
    rest: float
    """The error beyond this slope, as a relative error."""
    loss_gradient: float = 1.0
    """Gradient of the return value of `compute_loss`: the factor that its caller applied."""

    @classmethod
    def of(
        cls, site: CallSite, actual: Tensor, expected: Tensor, loss_gradient: float = 1.0
    ) -> "GradientScale":
        """Measure the scale of `actual` against `expected`, in the call at `site`."""
        a, e = actual.double(), expected.double()
        ee = float((e * e).sum())
        slope = float(((a - e) * e).sum()) / ee if ee else 0.0
        rest = float((a - (1 + slope) * e).norm()) / math.sqrt(ee) if ee else 0.0
        return cls(site.step, site.micro_batch, slope, rest, loss_gradient)

    @property
    def factor(self) -> float:
        """Return the factor on the reference's gradient."""
        return 1 + self.slope

    @property
    def length(self) -> float:
        """Return the factor if it is the only difference. Return 1 if the direction differs."""
        return self.factor if self.rest <= PARALLEL * max(1.0, self.factor) else 1.0

    def is_parallel(self, unit: float) -> bool:
        """Return True if only the length differs from the reference's. unit: unit roundoff."""
        allowed = max(PARALLEL, UNITS_OF_NOISE * unit)
        return self.factor > 0 and self.rest <= allowed * self.factor


def is_scaled_alike(scales: Sequence[GradientScale], unit: float) -> bool:
    """Return True if the micro-batches of every step share one factor, and some factor is not 1.

    scales: of all ranks.
    unit: unit roundoff of the candidate's dtype. The length of a gradient is no more accurate than its
        direction: the rounding of a fused head exceeds the unit.
    """
    if not scales or not all(one.is_parallel(unit) for one in scales):
        return False
    noise = max(UNITS_OF_NOISE * unit, *(one.rest / one.factor for one in scales))
    for _, group in groupby(sorted(scales, key=lambda one: one.step), lambda one: one.step):
        of_step = list(group)
        for values in ([one.factor for one in of_step], [one.loss_gradient for one in of_step]):
            if not min(values) > 0 or max(values) > (1 + noise) * min(values):
                return False
    return any(abs(one.slope) > noise or abs(one.loss_gradient - 1) > noise for one in scales)


@dataclass(slots=True)
class ScaledStep:
    """The scale of one step."""

    step: int
    factor: float
    """Factor on all gradients at module boundaries."""
    of_loss: float
    """Factor on the return value of `compute_loss`."""
    taken_off: Phase | None = None
    """The phase that removed the factor; None if the optimizer gets scaled gradients."""
    norm: float | None = None
    """The norm that clipping computed, over the reference's, if the gradients were scaled then."""
    left: float | None = None
    """The length of the unscaled gradients over the reference's; None if most parameters disagree."""
    averaged: Phase | None = None
    """The phase that removed the number of ranks only, by averaging; None if none did."""


@dataclass
class LossScale:
    """Finds the factor of each step in its first backward pass, and the phase that removes it."""

    unit: float
    """Unit roundoff of the candidate's dtype."""
    num_ranks: int = 1
    """Data-parallel ranks. A loss may be multiplied by their number in addition to a scale: averaging
    over ranks removes the one, unscaling the other."""
    steps: list[ScaledStep] = field(default_factory=list)
    """The steps so far, in order."""
    of_gradients: float = 1.0
    """The current factor on `.grad`."""
    _running: ScaledStep | None = None

    def begin_step(self) -> None:
        """Forget the factor of the previous step. Called before a step runs."""
        self._running, self.of_gradients = None, 1.0

    def learn(self, found: GradientScale) -> None:
        """Take the factor from the first backward pass of a step. Called as each pass begins."""
        if self._running is not None:
            self._running.of_loss = self._running.factor / found.loss_gradient
            return
        of_loss = 1.0
        if found.is_parallel(self.unit) and found.loss_gradient > 0:
            of_loss = _nearest_plain(found.factor / found.loss_gradient, self.unit)
        factor = of_loss * found.loss_gradient
        self._running = ScaledStep(found.step, factor, of_loss)
        self.steps.append(self._running)
        self.of_gradients = factor

    @property
    def factor(self) -> float:
        """Return the factor of the running step."""
        return 1.0 if self._running is None else self._running.factor

    @property
    def of_loss(self) -> float:
        """Return the factor on the return value of `compute_loss` in the last backward pass."""
        return 1.0 if self._running is None else self._running.of_loss

    def has_overflown(self, gradient: Tensor) -> bool:
        """Return True if a scaled gradient is not finite, so that nothing may be injected.

        The trainer has to see the overflow: it skips the step and lowers its scale.
        """
        return self.factor != 1 and not bool(gradient.isfinite().all())

    def end_phase(self, phase: Phase, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Find out if a phase removed the factor, or only the number of ranks from it.

        The remaining factor is the one that is nearest to the length of the gradients.

        pairs: each gradient after the phase, and the reference's.
        """
        if self._running is None or self.of_gradients == 1:
            return
        lengths = []
        for actual, expected in pairs:
            a, e = actual.double().cpu(), expected.double()
            if square := float((e * e).sum()):
                lengths.append(float((a * e).sum()) / square)
        # The median: in a sum, one parameter that kept the factor would outweigh all others.
        length = median(lengths) if lengths else math.nan
        if not 0 < length < math.inf:
            return
        averaged = self.of_gradients / self.num_ranks
        if self._running.averaged is None and _is_nearer(length, averaged, 1.0):
            if _is_nearer(length, averaged, self.of_gradients):
                self._running.averaged, self.of_gradients = phase, averaged
        elif not _is_nearer(length, self.of_gradients, 1.0):
            self._running.taken_off, self.of_gradients = phase, 1.0
            self._running.left = length if _most_agree(lengths) else None

    def note_norm(self, ratio: float) -> None:
        """Keep the norm that clipping computed, over the reference's."""
        if self._running is not None and self._running.taken_off is None:
            self._running.norm = ratio


def was_read_scaled(step: ScaledStep) -> bool:
    """Return True if clipping measured gradients that still had the factor."""
    return step.norm is not None and _is_nearer(step.norm, step.factor, 1.0)


def _most_agree(lengths: Sequence[float]) -> bool:
    """Return True if the middle half of `lengths` is about one number."""
    ordered = sorted(lengths)
    low, high = (ordered[part * (len(ordered) - 1) // 4] for part in (1, 3))
    return low > 0 and high <= (1 + PARALLEL) * low


def _is_nearer(value: float, to: float, than_to: float) -> bool:
    """Return True if `value` is positive, finite and nearer to one factor than to another."""
    if not 0 < value < math.inf:
        return False
    return abs(math.log(value / to)) < abs(math.log(value / than_to))


def _nearest_plain(factor: float, unit: float) -> float:
    """Round `factor` to a whole number, or the reciprocal of one, if that is within rounding.

    Such a factor is a number of ranks, micro-batches or tokens, or a power of two. Above 1 / (2 unit)
    several whole numbers are within rounding, and only a power of two is taken.
    """
    turned = factor < 1
    number = 1 / factor if turned else factor
    nearest = float(round(number))
    if nearest > 1 / (2 * unit) and math.isfinite(number):
        nearest = 2.0 ** round(math.log2(number))
    if abs(number - nearest) > unit * nearest:
        nearest = number
    return 1 / nearest if turned else nearest
