"""The factor by which a trainer scales its loss, and so all gradients until a phase takes it off.

GradScaler multiplies the loss by 65536 and divides the gradients before they are clipped; a loss
times the number of ranks is divided where gradients are averaged over them. What lies between is
the reference's times one factor.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import median

from torch import Tensor

from assay.sites import CallSite, Phase

# A gradient of the right direction and another length: what is left after scaling, relative to
# what the scale changes. One wrong element in a thousand would leave 3%.
PARALLEL = 0.02

# Rounding moves the mean of many elements by less than one unit; four are none of its errors.
UNITS_OF_NOISE = 4


@dataclass(frozen=True, slots=True)
class GradientScale:
    """How much longer the gradient that the loss made is than the reference's, in one backward.

    slope: of the error on the expected value; rest: what it leaves, as a relative error.
    loss_gradient: the gradient of what `compute_loss` returned: what its caller multiplied it by.
    """

    step: int
    micro_batch: int
    slope: float
    rest: float
    loss_gradient: float = 1.0

    @classmethod
    def of(
        cls, site: CallSite, actual: Tensor, expected: Tensor, loss_gradient: float = 1.0
    ) -> "GradientScale":
        """The scale of `actual` against `expected`, in the call at `site`."""
        a, e = actual.double(), expected.double()
        ee = float((e * e).sum())
        slope = float(((a - e) * e).sum()) / ee if ee else 0.0
        rest = float((a - (1 + slope) * e).norm()) / math.sqrt(ee) if ee else 0.0
        return cls(site.step, site.micro_batch, slope, rest, loss_gradient)

    @property
    def factor(self) -> float:
        """By which the reference's gradient was multiplied."""
        return 1 + self.slope

    @property
    def length(self) -> float:
        """Return the factor if it is the only difference. Return 1 if the direction differs."""
        return self.factor if self.rest <= PARALLEL * max(1.0, self.factor) else 1.0

    def is_parallel(self, unit: float) -> bool:
        """Whether the gradient is the reference's but for its length, in a dtype of this unit."""
        allowed = max(PARALLEL, UNITS_OF_NOISE * unit)
        return self.factor > 0 and self.rest <= allowed * self.factor


def is_scaled_alike(scales: Sequence[GradientScale], unit: float) -> bool:
    """Whether every step has one factor on the loss of all its micro-batches, somewhere not 1.

    scales: of all ranks; unit: unit roundoff of the candidate's dtype. The length of a gradient is
        known as well as its direction: one that was computed through a fused head has that head's
        rounding, which is above the unit.
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
    """The scale of one step.

    factor: on all gradients at module boundaries; of_loss: on what `compute_loss` returned.
    taken_off: the phase after which gradients no longer have the factor; None if they still have
        it when the optimizer gets them.
    norm: the norm that clipping found, over the reference's, where the factor was on when it began.
    left: the length of gradients once it is taken off, over the reference's; None where it is not one
        number for most parameters.
    averaged: the phase that took off the number of ranks alone, as a mean over them; None if none did.
    """

    step: int
    factor: float
    of_loss: float
    taken_off: Phase | None = None
    norm: float | None = None
    left: float | None = None
    averaged: Phase | None = None


@dataclass
class LossScale:
    """Finds the factor of each step in its first backward, and divides it out of what is measured.

    unit: unit roundoff of the candidate's dtype.
    num_ranks: of dp. A loss may be multiplied by it as well as by a scale: gradients that are averaged
        over ranks lose the one, and those that are unscaled the other.
    steps: those that have run, in their order.
    of_gradients: the factor that `.grad` has now.
    """

    unit: float
    num_ranks: int = 1
    steps: list[ScaledStep] = field(default_factory=list)
    of_gradients: float = 1.0
    _running: ScaledStep | None = None

    def begin_step(self) -> None:
        """Called before a step runs: its factor is not known yet."""
        self._running, self.of_gradients = None, 1.0

    def learn(self, found: GradientScale) -> None:
        """Called as each backward begins; the first one of a step decides."""
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
        """Of the running step."""
        return 1.0 if self._running is None else self._running.factor

    @property
    def of_loss(self) -> float:
        """Of what `compute_loss` returned for the micro-batch whose backward ran last."""
        return 1.0 if self._running is None else self._running.of_loss

    def has_overflown(self, gradient: Tensor) -> bool:
        """Whether a scaled gradient is not finite: nothing is injected there.

        A trainer has to see it, which then skips the step and scales the next one by less.
        """
        return self.factor != 1 and not bool(gradient.isfinite().all())

    def end_phase(self, phase: Phase, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Find out whether a phase took the factor off, or the number of ranks of it.

        Gradients are then nearer to what is left of it.

        pairs: each gradient after the phase, and the reference's.
        """
        if self._running is None or self.of_gradients == 1:
            return
        lengths = []
        for actual, expected in pairs:
            a, e = actual.double().cpu(), expected.double()
            if square := float((e * e).sum()):
                lengths.append(float((a * e).sum()) / square)
        # Of most parameters: one that kept the factor would outweigh all others in a sum.
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
        """Keep the norm that clipping found, over the reference's."""
        if self._running is not None and self._running.taken_off is None:
            self._running.norm = ratio


def was_read_scaled(step: ScaledStep) -> bool:
    """Whether clipping measured gradients that still had the factor."""
    return step.norm is not None and _is_nearer(step.norm, step.factor, 1.0)


def _most_agree(lengths: Sequence[float]) -> bool:
    """Whether the middle half of them is one number."""
    ordered = sorted(lengths)
    low, high = (ordered[part * (len(ordered) - 1) // 4] for part in (1, 3))
    return low > 0 and high <= (1 + PARALLEL) * low


def _is_nearer(value: float, to: float, than_to: float) -> bool:
    """Whether `value` is nearer to one factor than to another; one without a size is to neither."""
    if not 0 < value < math.inf:
        return False
    return abs(math.log(value / to)) < abs(math.log(value / than_to))


def _nearest_plain(factor: float, unit: float) -> float:
    """The whole number, or one divided by one, that `factor` is but for rounding; else itself.

    A number of ranks, micro-batches or tokens, or a power of two. Above 1 / (2 unit) several whole
    numbers are within a rounding.
    """
    turned = factor < 1
    number = 1 / factor if turned else factor
    nearest = float(round(number))
    if nearest > 1 / (2 * unit) or abs(number - nearest) > unit * nearest:
        nearest = number
    return 1 / nearest if turned else nearest
