"""Verdict of tunings: what each model learned, and how its losses compare with a baseline."""

import math
from collections.abc import Sequence
from statistics import fmean

from scipy.stats import ttest_rel

from assay.verdicts import Level, Measurement, Outcome, Unmatched, Verdict, overall_outcome
from assay_bench.tuning.band import BandError, band_of, judge_losses
from assay_bench.tuning.records import Tuning, TuningRecord

# Chance that a model that learned nothing passes.
SIGNIFICANCE = 0.01


def judge_tunings(
    tunings: Sequence[Tuning], baseline: Sequence[Tuning] | None
) -> tuple[Verdict, list[Measurement]]:
    """Judge what each tuning learned and, with a baseline, its losses."""
    levels: dict[str, Level] = {}
    rows: list[Measurement] = []
    for tuning in tunings:
        title = tuning.record.title
        levels[f"{title}: learned"] = judge_learning(tuning)
        rows += _rows(tuning)
        if baseline is not None:
            levels[f"{title}: losses"] = judge_by_baseline(tuning, baseline)
    outcomes = [level.verdict or Outcome.NOT_COMPARED for level in levels.values()]
    has_non_finite = any(not math.isfinite(loss) for tuning in tunings for loss in tuning.curve)
    not_compared = [name for name, level in levels.items() if level.verdict is Outcome.NOT_COMPARED]
    verdict = Verdict(
        verdict=overall_outcome(outcomes),
        model={"name": ", ".join(dict.fromkeys(one.record.model for one in tunings))},
        reference={"run": "the model before tuning" if baseline is None else "the baseline"},
        candidate={"run": ", ".join(dict.fromkeys(one.record.recipe.run for one in tunings))},
        levels=levels,
        notes=[note for tuning in tunings for note in _notes(tuning)],
        diagnosis="non-finite" if has_non_finite else None,
        compared=sum(level.compared for level in levels.values()),
        compared_unit="losses",
        unmatched=Unmatched(expected=not_compared),
    )
    return verdict, rows


def judge_learning(tuning: Tuning) -> Level:
    """Test whether held-out text is more probable than before, with a paired t-test over rows."""
    for one in tuning.losses:
        if not math.isfinite(one.loss):
            reason = f"the loss of step {one.step} is {one.loss}"
            return Level(verdict=Outcome.FAIL, reason=reason, compared=one.step + 1)
    before, after = _weighted_rows(tuning.record)
    p = float(ttest_rel(after, before, alternative="less").pvalue)
    reason = (
        f"held-out loss {fmean(before):.4f} before and {fmean(after):.4f} nats per token after"
        f" {len(tuning.losses)} steps (p = {p:.2g})"
    )
    outcome = Outcome.PASS if p < SIGNIFICANCE else Outcome.FAIL
    return Level(verdict=outcome, reason=reason, compared=len(before))


def judge_by_baseline(tuning: Tuning, baseline: Sequence[Tuning]) -> Level:
    """Compare the losses with the band of the baseline's seeds of the same model and permutation."""
    record = tuning.record
    name = (record.model, record.permutation)
    matching = [one for one in baseline if (one.record.model, one.record.permutation) == name]
    if not matching:
        reason = f"the baseline has no permutation {record.permutation} of {record.model}"
        return Level(verdict=Outcome.NOT_COMPARED, reason=reason)
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
            return Level(verdict=Outcome.NOT_COMPARED, reason=reason)
    try:
        band = band_of([one.curve for one in matching])
    except BandError as error:
        return Level(verdict=Outcome.NOT_COMPARED, reason=str(error))
    return judge_losses(tuning.curve, band)


def _batches_of(record: TuningRecord) -> dict[str, int]:
    recipe = record.recipe
    return {
        "steps": recipe.steps,
        "batch_size": recipe.batch_size,
        "sequence_length": recipe.sequence_length,
    }


def _way_of(record: TuningRecord) -> dict[str, object]:
    """Return the settings that change losses by more than rounding: not trainer and ranks."""
    way = record.recipe.permutations[record.permutation]
    return {"learning_rate": way.learning_rate, "features": sorted(way.features)}


def _weighted_rows(record: TuningRecord) -> tuple[list[float], list[float]]:
    """Return held-out losses by row, before and after, weighted by the shares of the sources."""
    total = sum(one.share for one in record.recipe.data)
    shares = {one.source: one.share / total for one in record.recipe.data}

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
