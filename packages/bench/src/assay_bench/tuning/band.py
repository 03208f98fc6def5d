"""The band that the losses of another seed stay in, from the curves of several seeds.

The mean loss of each window of steps gets a prediction interval: Student's t times the standard deviation
of the seeds. If these means are normal, FALSE_ALARMS of healthy runs leave the band in any window. Real tails
are somewhat heavier.
"""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Self

from pydantic import Field
from scipy.stats import t as student_t

from assay.errors import UsageError
from assay.verdicts import Level, Number, Outcome, Record

# Share of healthy runs that leave the band, as for scores (assay_bench.evaluations.scores).
FALSE_ALARMS = 0.01

# Few windows, so that each mean averages many batches and is about normal. Of 40 healthy runs of 40 steps,
# compared with bands of 11 others, 8 % left one of 20 windows and 4 % one of 10 with each window's own
# standard deviation. With the pooled one as lower bound (`band_of`), 2 % did: one run, whose loss rises for
# a few steps.
NUM_WINDOWS = 10


class BandError(UsageError):
    """The curves do not make a band."""

    @classmethod
    def of(cls, problem: str) -> Self:
        """Make the error."""
        return cls(f"a band needs at least two finite curves of equal length: {problem}")


class LossBand(Record):
    """Prediction intervals of the mean loss in windows of steps, in nats per token."""

    num_steps: int
    num_curves: int
    """Curves of the baseline."""
    window: int
    """Steps of each window; the last window can have more."""
    means: list[Number] = Field(min_length=1)
    half_widths: list[Number] = Field(min_length=1)

    @property
    def resolution(self) -> float:
        """Return the smallest change that is detected in every window, in nats per token."""
        return max(self.half_widths)

    def steps_of(self, number: int) -> range:
        """Return the steps of a window."""
        last = number == len(self.means) - 1
        return range(number * self.window, self.num_steps if last else (number + 1) * self.window)

    def means_of(self, curve: Sequence[float]) -> list[float]:
        """Return the mean of a curve in each window."""
        return [
            fmean(curve[step] for step in self.steps_of(number))
            for number in range(len(self.means))
        ]


def band_of(curves: Sequence[Sequence[float]]) -> LossBand:
    """Make the band of runs that differ only in their seeds.

    curves: the loss of each step, in nats per token.
    Raises: BandError for fewer than two curves, or curves that are not finite, not equally long, or equal.
    Source: prediction interval on one observation of a normal distribution, Montgomery & Runger, Applied
        Statistics and Probability for Engineers, 3rd edition, (8-29), with Bonferroni's inequality over
        all windows.
    """
    if len(curves) < 2:
        raise BandError.of(f"found {len(curves)}")
    num_steps = len(curves[0])
    if not num_steps or any(len(curve) != num_steps for curve in curves):
        raise BandError.of(f"found {', '.join(str(len(curve)) for curve in curves)} steps")
    if not all(math.isfinite(loss) for curve in curves for loss in curve):
        raise BandError.of("a loss is not finite")
    if len({tuple(curve) for curve in curves}) < len(curves):
        raise BandError.of("two are equal, so their spread says nothing about other seeds")
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
    # A few seeds can agree by chance in one window: the pooled deviation is the lower bound.
    pooled = math.sqrt(fmean(spread**2 for spread in spreads))
    return cut.model_copy(
        update={
            "means": [fmean(values) for values in by_window],
            "half_widths": [
                quantile * max(spread, pooled) * math.sqrt(1 + 1 / num) for spread in spreads
            ],
        }
    )


def judge_losses(curve: Sequence[float], band: LossBand) -> Level:
    """Judge a curve by the band. A loss that is too low or not finite fails too.

    Returns: FAIL with `first_step`, the first step of the first window outside of the band;
        NOT_COMPARED for a curve of another length.
    """
    for step, loss in enumerate(curve):
        if not math.isfinite(loss):
            reason = f"the loss of step {step} is {loss}"
            return _level(Outcome.FAIL, reason, compared=step + 1, first_step=step)
    if len(curve) != band.num_steps:
        reason = f"the run has {len(curve)} steps, the band {band.num_steps}"
        return Level(verdict=Outcome.NOT_COMPARED, reason=reason)
    for number, mean in enumerate(band.means_of(curve)):
        expected, half_width = band.means[number], band.half_widths[number]
        if abs(mean - expected) > half_width:
            steps = band.steps_of(number)
            too = "higher" if mean > expected else "lower"
            reason = (
                f"loss {mean:.4f} nats per token in steps {steps[0]} to {steps[-1]} is {too} than"
                f" {expected:.4f} ± {half_width:.4f} of {band.num_curves} seeds"
            )
            if mean < expected:
                reason += (
                    ": does the input contain the label, or the training data a held-out text?"
                )
            return _level(Outcome.FAIL, reason, compared=len(curve), first_step=steps[0])
    reason = (
        f"inside the band of {band.num_curves} seeds; changes below {band.resolution:.4f} nats per token"
        " can be missed"
    )
    return _level(Outcome.PASS, reason, compared=len(curve), first_step=None)


def _level(outcome: Outcome, reason: str, *, compared: int, first_step: int | None) -> Level:
    return Level.model_validate(
        {"verdict": outcome, "reason": reason, "compared": compared, "first_step": first_step}
    )
