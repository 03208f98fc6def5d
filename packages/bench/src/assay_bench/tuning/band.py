"""The band in which the losses of a run with another seed lie, made of the curves of several seeds.

A curve is cut into windows of steps, and each window's mean is held to those of the seeds. The mean of
one more run differs from theirs by Student's t times their standard deviation: the limits are those of
a prediction interval, so wide that FALSE_ALARMS of healthy runs leave the band anywhere, where the means
of seeds are normal. Their tails are somewhat heavier.
"""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Self

from pydantic import Field
from scipy.stats import t as student_t

from assay.errors import UsageError
from assay.verdicts import Level, Number, Outcome, Record

# The share of healthy runs that leave the band in any window: as for scores, see assay_bench.judging.
FALSE_ALARMS = 0.01

# Few enough that each mean has the noise of many batches in it, and is about normal. Of 40 healthy runs
# of 40 steps, held to bands of 11 others with each window's own spread, 8 % left one of 20 windows and
# 4 % one of 10; with the usual spread, see `band_of`, 2 %: one run, whose loss rises for a few steps.
NUM_WINDOWS = 10


class BandError(UsageError):
    """Curves that make no band."""

    @classmethod
    def of(cls, problem: str) -> Self:
        """Why not."""
        return cls(f"a band needs at least two finite curves of equally many steps: {problem}")


class LossBand(Record):
    """Means of windows of steps, in nats per token: what other seeds have, and how far they vary.

    num_steps, num_curves: of the curves that it was made of. window: steps of each mean; the last
    window may have more.
    """

    num_steps: int
    num_curves: int
    window: int
    means: list[Number] = Field(min_length=1)
    half_widths: list[Number] = Field(min_length=1)

    @property
    def resolution(self) -> float:
        """The smallest change of a window's mean that is seen wherever it is, in nats per token."""
        return max(self.half_widths)

    def steps_of(self, number: int) -> range:
        """The steps of window `number`."""
        last = number == len(self.means) - 1
        return range(number * self.window, self.num_steps if last else (number + 1) * self.window)

    def means_of(self, curve: Sequence[float]) -> list[float]:
        """The mean of `curve` in each window."""
        return [
            fmean(curve[step] for step in self.steps_of(number))
            for number in range(len(self.means))
        ]


def band_of(curves: Sequence[Sequence[float]]) -> LossBand:
    """The band of the losses of runs that differ in nothing but their seeds.

    curves: nats per token for each step.
    Raises: BandError for fewer than two, for curves that are not finite, not equally long, or equal.
    Source: prediction interval on one observation of a normal distribution, Montgomery & Runger, Applied
        Statistics and Probability for Engineers, 3rd edition, (8-29); for all windows at once by
        Bonferroni's inequality, however they depend on each other.
    """
    if len(curves) < 2:
        raise BandError.of(f"there is {len(curves)}")
    num_steps = len(curves[0])
    if not num_steps or any(len(curve) != num_steps for curve in curves):
        raise BandError.of(f"they have {', '.join(str(len(curve)) for curve in curves)} steps")
    if not all(math.isfinite(loss) for curve in curves for loss in curve):
        raise BandError.of("a loss is not finite")
    if len({tuple(curve) for curve in curves}) < len(curves):
        raise BandError.of("two are equal, so that their spread says nothing of other seeds")
    window = max(1, num_steps // NUM_WINDOWS)
    num_windows = num_steps // window
    cut = LossBand(
        num_steps=num_steps,
        num_curves=len(curves),
        window=window,
        means=[math.nan] * num_windows,
        half_widths=[math.nan] * num_windows,
    )
    by_window = list(zip(*(cut.means_of(curve) for curve in curves), strict=True))
    num = len(curves)
    quantile = float(student_t.isf(FALSE_ALARMS / (2 * num_windows), num - 1))
    spreads = [stdev(values) for values in by_window]
    # A few seeds may lie close in one window by chance: no window is held to less than the usual.
    usual = math.sqrt(fmean(spread**2 for spread in spreads))
    return cut.model_copy(
        update={
            "means": [fmean(values) for values in by_window],
            "half_widths": [
                quantile * max(spread, usual) * math.sqrt(1 + 1 / num) for spread in spreads
            ],
        }
    )


def judge_losses(curve: Sequence[float], band: LossBand) -> Level:
    """Does `curve` stay in the band? A loss that is not finite always fails; so does one too low.

    Returns: FAIL with `first_step`, the first step of the first window that is out of the band, and
        in its reason the mean there and the limit; NOT_COMPARED for a curve of another length.
    """
    for step, loss in enumerate(curve):
        if not math.isfinite(loss):
            reason = f"the loss of step {step} is {loss}"
            return _level(Outcome.FAIL, reason, compared=step + 1, first_step=step)
    if len(curve) != band.num_steps:
        reason = f"it has {len(curve)} steps, the band {band.num_steps}"
        return Level(verdict=Outcome.NOT_COMPARED, reason=reason)
    for number, mean in enumerate(band.means_of(curve)):
        expected, half_width = band.means[number], band.half_widths[number]
        if abs(mean - expected) > half_width:
            steps = band.steps_of(number)
            too = "higher" if mean > expected else "lower"
            reason = (
                f"loss {mean:.4f} nats per token in the steps {steps[0]} to {steps[-1]}, {too} than"
                f" {expected:.4f} ± {half_width:.4f} of {band.num_curves} seeds"
            )
            if mean < expected:
                reason += ": is a label in the input, or a held-out text in the training data?"
            return _level(Outcome.FAIL, reason, compared=len(curve), first_step=steps[0])
    reason = (
        f"in the band of {band.num_curves} seeds; a change of less than {band.resolution:.4f} nats"
        " per token could not have been seen everywhere"
    )
    return _level(Outcome.PASS, reason, compared=len(curve), first_step=None)


def _level(outcome: Outcome, reason: str, *, compared: int, first_step: int | None) -> Level:
    return Level.model_validate(
        {"verdict": outcome, "reason": reason, "compared": compared, "first_step": first_step}
    )
