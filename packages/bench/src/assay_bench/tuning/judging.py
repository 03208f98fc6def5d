"""Verdict of tunings: what each model learned, and how its losses compare with a baseline.

Losses are compared with the band that another seed's losses stay in. The mean loss of each window of steps
gets a prediction interval: Student's t times the standard deviation of the seeds. If these means are normal,
FALSE_ALARMS of healthy runs leave the band in any window. Real tails are somewhat heavier.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from scipy.stats import t as student_t
from scipy.stats import ttest_rel

from assay.comparing.levels import Cause, LevelResult, conclude, failed, not_compared, passed
from assay.errors import UsageError
from assay.verdicts import (
    Measurement,
    Outcome,
    Unmatched,
    Verdict,
)
from assay_bench.tuning.records import Tuning, TuningRecord

# Chance that a model that learned nothing passes.
SIGNIFICANCE = 0.01

# Share of healthy runs that leave the band, as for scores (assay_bench.evaluations.scores).
FALSE_ALARMS = 0.01

# Few windows, so that each mean averages many batches and is about normal. Of 40 healthy runs of 40 steps,
# compared with bands of 11 others, 8 % left one of 20 windows and 4 % one of 10 with each window's own
# standard deviation. With the pooled one as lower bound (`band_of`), 2 % did: one run, whose loss rises for
# a few steps.
NUM_WINDOWS = 10


def judge_tunings(
    tunings: Sequence[Tuning], baseline: Sequence[Tuning] | None
) -> tuple[Verdict, list[Measurement]]:
    """Judge what each tuning learned and, with a baseline, its losses."""
    levels: dict[str, LevelResult] = {}
    rows: list[Measurement] = []
    for tuning in tunings:
        title = tuning.record.title
        levels[f"{title}: learned"] = judge_learning(tuning)
        rows += _rows(tuning)
        if baseline is not None:
            levels[f"{title}: losses"] = judge_by_baseline(tuning, baseline)
    has_non_finite = any(not math.isfinite(loss) for tuning in tunings for loss in tuning.curve)
    not_compared = [
        name for name, level in levels.items() if level.level.verdict is Outcome.NOT_COMPARED
    ]
    verdict = conclude(
        levels,
        Cause("non-finite") if has_non_finite else None,
        model={"name": ", ".join(dict.fromkeys(one.record.model for one in tunings))},
        reference={"run": "the model before tuning" if baseline is None else "the baseline"},
        candidate={"run": ", ".join(dict.fromkeys(one.record.recipe.run for one in tunings))},
        notes=[note for tuning in tunings for note in _notes(tuning)],
        compared_unit="losses",
        unmatched=Unmatched(expected=not_compared),
    )
    return verdict, rows


def judge_learning(tuning: Tuning) -> LevelResult:
    """Test whether held-out text is more probable than before, with a paired t-test over rows."""
    for one in tuning.losses:
        if not math.isfinite(one.loss):
            reason = f"the loss of step {one.step} is {one.loss}"
            return failed(one.step + 1, reason)
    before, after = _weighted_rows(tuning.record)
    p = float(ttest_rel(after, before, alternative="less").pvalue)
    reason = (
        f"held-out loss {fmean(before):.4f} before and {fmean(after):.4f} nats per token after"
        f" {len(tuning.losses)} steps (p = {p:.2g})"
    )
    judge = passed if p < SIGNIFICANCE else failed
    return judge(len(before), reason=reason)


def judge_by_baseline(tuning: Tuning, baseline: Sequence[Tuning]) -> LevelResult:
    """Compare the losses with the band of the baseline's seeds of the same model and permutation."""
    record = tuning.record
    name = (record.model, record.permutation)
    matching = [one for one in baseline if (one.record.model, one.record.permutation) == name]
    if not matching:
        reason = f"the baseline has no permutation {record.permutation} of {record.model}"
        return not_compared(reason)
    expected = matching[0].record
    for what, ours, theirs in (
        ("data", record.start.data_hash, expected.start.data_hash),
        ("initial weights", record.start.weights_hash, expected.start.weights_hash),
        ("shares of the data", record.recipe.data, expected.recipe.data),
        ("batches", _batches_of(record), _batches_of(expected)),
        ("learning rate or features", _way_of(record), _way_of(expected)),
    ):
        if ours != theirs:
            reason = f"the baseline has different {what}: {theirs}, not {ours}"
            return not_compared(reason)
    try:
        band = band_of([one.curve for one in matching])
    except UsageError as error:
        return not_compared(str(error))
    return judge_losses(tuning.curve, band)


def _batches_of(record: TuningRecord) -> dict[str, int]:
    return record.recipe.model_dump(include={"steps", "batch_size", "sequence_length"})


def _way_of(record: TuningRecord) -> dict[str, object]:
    """Return the settings that change losses by more than rounding: not trainer and ranks."""
    return {"learning_rate": record.way.learning_rate, "features": sorted(record.way.features)}


def _weighted_rows(record: TuningRecord) -> tuple[list[float], list[float]]:
    """Return held-out losses by row, before and after, weighted by the shares of the sources."""
    shares = record.recipe.shares

    def mixed(held_out: dict[str, list[float]]) -> list[float]:
        weighted = [[share * loss for loss in held_out[name]] for name, share in shares.items()]
        return [sum(column) for column in zip(*weighted, strict=True)]

    return mixed(record.start.held_out), mixed(record.end.held_out)


def _notes(tuning: Tuning) -> list[str]:
    record = tuning.record
    tokens = sum(one.tokens for one in tuning.losses)
    seconds = sum(one.seconds for one in tuning.losses)
    changes = ", ".join(
        f"{source} {math.exp(fmean(before)):.3f} -> {math.exp(fmean(record.end.held_out[source])):.3f}"
        for source, before in record.start.held_out.items()
    )
    return [
        f"{record.title}: perplexity per token on held-out text: {changes}",
        f"{record.title}: {tokens:,} tokens in {seconds:.0f} s",
    ]


def _rows(tuning: Tuning) -> list[Measurement]:
    before, after = (fmean(rows) for rows in _weighted_rows(tuning.record))
    return [
        Measurement(
            level=f"{tuning.record.title}: learned", module="", port="held-out", statistic="loss",
            actual=after, expected=before, ratio=after / before if before else math.inf,
        )
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class LossBand:
    """Prediction intervals of the mean loss in windows of steps, in nats per token."""

    num_curves: int
    """Curves of the baseline."""
    windows: list[range]
    """Steps of each window; the last window can have more."""
    means: list[float]
    half_widths: list[float]

    @property
    def resolution(self) -> float:
        """Return the smallest change that is detected in every window, in nats per token."""
        return max(self.half_widths)


def band_of(curves: Sequence[Sequence[float]]) -> LossBand:
    """Make the band of runs that differ only in their seeds.

    curves: the loss of each step, in nats per token.
    Raises: UsageError for fewer than two curves, or curves that are not finite, not equally long, or equal.
    Source: prediction interval on one observation of a normal distribution, Montgomery & Runger, Applied
        Statistics and Probability for Engineers, 3rd edition, (8-29), with Bonferroni's inequality over
        all windows.
    """
    num_steps = len(curves[0]) if curves else 0
    problem = ""
    if len(curves) < 2:
        problem = f"found {len(curves)}"
    elif not num_steps or any(len(curve) != num_steps for curve in curves):
        problem = f"found {', '.join(str(len(curve)) for curve in curves)} steps"
    elif not all(math.isfinite(loss) for curve in curves for loss in curve):
        problem = "a loss is not finite"
    elif len({tuple(curve) for curve in curves}) < len(curves):
        problem = "two are equal, so their spread says nothing about other seeds"
    if problem:
        raise UsageError(f"a band needs at least two finite curves of equal length: {problem}")
    size = max(1, num_steps // NUM_WINDOWS)
    starts = range(0, num_steps - size + 1, size)
    windows = [range(start, start + size) for start in starts]
    windows[-1] = range(starts[-1], num_steps)
    by_window = [[_mean_in(window, curve) for curve in curves] for window in windows]
    num = len(curves)
    quantile = float(student_t.isf(FALSE_ALARMS / (2 * len(windows)), num - 1))
    spreads = [stdev(values) for values in by_window]
    # A few seeds can agree by chance in one window: the pooled deviation is the lower bound.
    pooled = math.sqrt(fmean(spread**2 for spread in spreads))
    return LossBand(
        num_curves=num,
        windows=windows,
        means=[fmean(values) for values in by_window],
        half_widths=[quantile * max(spread, pooled) * math.sqrt(1 + 1 / num) for spread in spreads],
    )


def _mean_in(window: range, curve: Sequence[float]) -> float:
    return fmean(curve[window.start : window.stop])


def judge_losses(curve: Sequence[float], band: LossBand) -> LevelResult:
    """Judge a curve by the band. A loss that is too low or not finite fails too.

    Returns: FAIL with `first_step`, the first step of the first window outside of the band;
        NOT_COMPARED for a curve of another length.
    """
    num_steps = band.windows[-1].stop
    for step, loss in enumerate(curve):
        if not math.isfinite(loss):
            reason = f"the loss of step {step} is {loss}"
            return failed(step + 1, reason, first_step=step)
    if len(curve) != num_steps:
        reason = f"the run has {len(curve)} steps, the band {num_steps}"
        return not_compared(reason)
    for steps, expected, half_width in zip(band.windows, band.means, band.half_widths, strict=True):
        mean = _mean_in(steps, curve)
        if abs(mean - expected) > half_width:
            too = "higher" if mean > expected else "lower"
            reason = (
                f"loss {mean:.4f} nats per token in steps {steps[0]} to {steps[-1]} is {too} than"
                f" {expected:.4f} ± {half_width:.4f} of {band.num_curves} seeds"
            )
            if mean < expected:
                reason += (
                    ": does the input contain the label, or the training data a held-out text?"
                )
            return failed(len(curve), reason, first_step=steps[0])
    reason = (
        f"inside the band of {band.num_curves} seeds; changes below {band.resolution:.4f} nats per token"
        " can be missed"
    )
    return passed(len(curve), reason=reason, first_step=None)
