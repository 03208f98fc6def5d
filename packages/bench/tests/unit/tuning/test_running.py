"""Verdicts of tunings, and bands of losses."""

import math
import random
import re
from collections.abc import Mapping
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest

from assay.errors import UsageError
from assay.verdicts import Outcome
from assay_bench.tuning.records import (
    DataSource,
    Measured,
    ModelStart,
    Permutation,
    StepLoss,
    Tuning,
    TuningRecipe,
    TuningRecord,
)
from assay_bench.tuning.running import (
    LossBand,
    band_of,
    judge_by_baseline,
    judge_losses,
    judge_tunings,
)

RECIPE = TuningRecipe(
    models=["micro:llama"],
    run="cpu/float32",
    seeds=[0, 1],
    steps=2,
    batch_size=4,
    sequence_length=16,
    checkpoint_every=1,
    data=[
        DataSource(source="sums", share=3.0),
        DataSource(source="standard-library", margin=0.3),
    ],
    permutations={"full": Permutation(learning_rate=1e-3)},
)
BEFORE = {"sums": [4.0, 4.2, 4.4, 4.6], "standard-library": [1.0, 1.1, 1.0, 1.1]}
AFTER = {"sums": [2.0, 2.1, 2.4, 2.5], "standard-library": [1.2, 1.3, 1.2, 1.3]}


def tuning(
    *losses: float,
    seed: int = 0,
    after: Mapping[str, list[float]] = AFTER,
    start: Mapping[str, Any] | None = None,
    recipe: Mapping[str, Any] | None = None,
) -> Tuning:
    values = losses or (3.0, 2.0)
    kept = RECIPE.model_copy(update={"steps": len(values), **(recipe or {})})
    began = ModelStart(data_hash={"sums": "s"}, weights_hash="w", held_out=BEFORE)
    record = TuningRecord(
        schema=1,
        recipe_hash=kept.hash,
        recipe=kept,
        model="micro:llama",
        permutation="full",
        seed=seed,
        start=began.model_copy(update=start or {}),
        end=Measured(weights_hash="t", held_out=dict(after)),
        candidate={},
        losses_digest="d",
        provenance={},
    )
    lines = [
        StepLoss(step=step, loss=loss, learning_rate=1e-3, tokens=60, seconds=0.5)
        for step, loss in enumerate(values)
    ]
    return Tuning(record=record, losses=lines)


BASELINE = [tuning(3.0, 2.0, seed=1), tuning(3.1, 2.1, seed=2), tuning(3.05, 2.05, seed=3)]


def test_more_probable_held_out_text_passes() -> None:
    verdict, _ = judge_tunings([tuning()], None)
    assert verdict.verdict is Outcome.PASS
    assert verdict.headline == "Each tuned model learned its mixture and kept each source."
    learned, sums, library = verdict.levels.values()
    # 3/4 of 4.3 and 1/4 of 1.05; 3/4 of 2.25 and 1/4 of 1.25. Changes of rows: -1.45, -1.525, -1.45, -1.525. Their
    # deviation is 0.075 / sqrt(3), and Student's t with three degrees of freedom exceeds 4.5407 in 1 %.
    assert learned.reason == (
        "held-out loss 3.4875 before and 2.0000 nats per token after 2 steps (perplexity 32.7 -> 7.389):"
        " the change is at most -1.3892, and must be below 0"
    )
    assert learned.compared == 4
    # Changes -2, -2.1, -2, -2.1: -2.05 + 4.5407 * 0.1 / sqrt(3) / 2.
    assert str(sums.reason).endswith("the change is at most -1.9189, and must be below 0.1")
    assert str(library.reason).endswith("the change is at most +0.2000, and must be below 0.3")


def test_part_that_is_forgotten_fails_and_is_named_although_the_mixture_is_learned() -> None:
    # exp(1.194) = 3.3, exp(5.268) = 194.
    start = {"held_out": BEFORE | {"standard-library": [1.194] * 4}}
    found = tuning(start=start, after=AFTER | {"standard-library": [5.1, 5.2, 5.3, 5.472]})
    verdict, rows = judge_tunings([found], None)
    assert verdict.verdict is Outcome.FAIL
    assert verdict.headline is None
    failed = {name: one.reason for name, one in verdict.levels.items() if one.verdict == "FAIL"}
    assert list(failed) == ["micro:llama full seed 0: held-out standard-library"]
    assert "(perplexity 3.3 -> 194):" in str(*failed.values())
    assert [row.level for row in rows] == list(verdict.levels)


@pytest.mark.parametrize(
    ("rise", "expected"), [(0.29, Outcome.PASS), (0.31, Outcome.FAIL), (math.nan, Outcome.FAIL)]
)
def test_part_may_rise_by_its_margin(rise: float, expected: Outcome) -> None:
    after = AFTER | {"standard-library": [loss + rise for loss in BEFORE["standard-library"]]}
    assert judge_tunings([tuning(after=after)], None)[0].verdict is expected


def test_unchanged_losses_are_not_learning() -> None:
    verdict, _ = judge_tunings([tuning(after=BEFORE)], None)
    assert verdict.levels["micro:llama full seed 0: learned"].verdict is Outcome.FAIL


def test_chance_improvement_is_underpowered_and_says_how_many_rows_would_decide() -> None:
    verdict, _ = judge_tunings([tuning(after={**BEFORE, "sums": [3.0, 5.0, 4.0, 5.1]})], None)
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert verdict.headline == (
        "underpowered: too few held-out rows to decide micro:llama full seed 0: learned,"
        " micro:llama full seed 0: held-out sums."
    )
    # Changes of sums: -1, 0.8, -0.4, 0.5, with the mean -0.025 and the deviation 0.8261. From the margin 0.1:
    # ((2.326 + 0.842) * 0.8261 / 0.125)**2 = 438.3.
    reason = verdict.levels["micro:llama full seed 0: held-out sums"].reason
    assert reason == (
        "underpowered: held-out loss 4.3000 before and 4.2750 nats per token after 2 steps (perplexity 73.7 -> 71.88):"
        " the change is between -1.9006 and +1.8506, and must be below 0.1; about 439 rows would decide:"
        " set held_out_rows in the recipe"
    )


def test_shown_rise_fails() -> None:
    after = {**BEFORE, "sums": [4.3, 4.55, 4.7, 4.95]}
    verdict, _ = judge_tunings([tuning(after=after)], None)
    assert "the change is at least +0.25" in str(
        verdict.levels["micro:llama full seed 0: held-out sums"].reason
    )
    assert verdict.verdict is Outcome.FAIL


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_non_finite_loss_fails_in_spite_of_learning(loss: float) -> None:
    verdict, _ = judge_tunings([tuning(3.0, loss)], None)
    assert verdict.verdict is Outcome.FAIL
    assert verdict.diagnosis == "non-finite"
    reasons = {level.reason for level in verdict.levels.values()}
    assert reasons == {f"the loss of step 1 is {loss}"}


def test_losses_are_judged_by_the_baseline() -> None:
    verdict, rows = judge_tunings([tuning(3.05, 2.05, seed=9)], BASELINE)
    assert {name: level.verdict for name, level in verdict.levels.items()} == {
        "micro:llama full seed 9: learned": Outcome.PASS,
        "micro:llama full seed 9: held-out sums": Outcome.PASS,
        "micro:llama full seed 9: held-out standard-library": Outcome.PASS,
        "micro:llama full seed 9: losses": Outcome.PASS,
    }
    assert verdict.compared == 3 * 4 + 2
    assert [row.level for row in rows] == list(verdict.levels)[:3]
    verdict, _ = judge_tunings([tuning(9.0, 8.0, seed=9)], BASELINE)
    assert verdict.verdict is Outcome.FAIL
    assert verdict.levels["micro:llama full seed 9: learned"].verdict is Outcome.PASS


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            tuning(start={"data_hash": {"sums": "other"}}),
            "the baseline has different data: {'sums': 's'}, not {'sums': 'other'}",
        ),
        (
            tuning(start={"weights_hash": "other"}),
            "the baseline has different initial weights: w, not other",
        ),
        (
            tuning(3.0, 2.0, 1.0),
            "the baseline has different steps: 2, not 3",
        ),
        (
            tuning(recipe={"permutations": {"full": Permutation(learning_rate=1e-2)}}),
            "the baseline has different learning rate: 0.001, not 0.01",
        ),
        (
            tuning(recipe={"data": [DataSource(source="sums")]}, after={"sums": [1.0] * 4}),
            "the baseline has different shares of the data: ",
        ),
    ],
)
def test_different_tuning_is_not_compared(changed: Tuning, reason: str) -> None:
    level = judge_by_baseline(changed, BASELINE).level
    assert level.verdict is Outcome.NOT_COMPARED
    assert level.reason is not None
    assert level.reason.startswith(reason)


def test_different_trainer_and_ranks_are_compared() -> None:
    way = Permutation(learning_rate=1e-3, trainer="fsdp", ranks=2)
    changed = tuning(3.05, 2.05, recipe={"permutations": {"full": way}})
    assert judge_by_baseline(changed, BASELINE).level.verdict is Outcome.PASS


@pytest.mark.parametrize("baseline", [[], BASELINE[:1]])
def test_baseline_with_too_few_seeds_is_not_a_pass(baseline: list[Tuning]) -> None:
    verdict, _ = judge_tunings([tuning()], baseline)
    assert verdict.verdict is Outcome.NOT_COMPARED


def test_band_that_holds_a_run_that_learns_nothing_is_underpowered() -> None:
    """The loss before training is 3.4875: two seeds that differ by 0.1 give 2.05 ± 11."""
    found = [judge_by_baseline(tuning(*now), BASELINE[:2]) for now in ((3.05, 2.05), (30.0, 20.0))]
    assert [one.level.verdict for one in found] == [Outcome.NOT_COMPARED, Outcome.FAIL]
    assert found[0].level.reason == (
        "underpowered: the band of 2 seeds is too wide: a run that stays at the loss before training, 3.4875 nats"
        " per token, is inside; add seeds to the baseline"
    )
    verdict, _ = judge_tunings([tuning(3.05, 2.05, seed=9)], BASELINE[:2])
    assert verdict.headline == (
        "underpowered: too few held-out rows or seeds of the baseline to decide micro:llama full seed 9: losses."
    )


def test_documented_widths_of_a_band_are_those_of_its_seeds() -> None:
    page = (Path(__file__).parents[5] / "docs/benchmark.md").read_text(encoding="utf-8")
    (words,) = re.findall(r"half width is (.+?), in", page, re.DOTALL)
    for width, num in re.findall(r"([\d.]+) with (\d+)", " ".join(words.split())):
        curves = [[float(n)] * 10 for n in range(int(num))]
        (half, *_), deviation = band_of(curves).half_widths, stdev(range(int(num)))
        assert float(width) == pytest.approx(half / deviation, rel=0.01)


def test_notes_report_changes_and_margins() -> None:
    verdict, _ = judge_tunings([tuning()], None)
    *levels, cost = verdict.notes
    assert len(levels) == sum(one.verdict is Outcome.PASS for one in verdict.levels.values()) > 0
    for note in levels:
        assert "(perplexity " in note
        assert re.search(r": the change is at most [-+][\d.]+, and must be below [\d.]+$", note)
    assert cost == "micro:llama full seed 0: 120 tokens in 1 s"


INF, NAN = math.inf, math.nan


def noisy_curve(rng: random.Random, num_steps: int = 200) -> list[float]:
    """A loss that falls from 3 to 1, with noise of batches and of the seed."""
    of_seed = rng.gauss(0, 0.02)
    return [1 + 2 * math.exp(-step / 40) + of_seed + rng.gauss(0, 0.1) for step in range(num_steps)]


@pytest.fixture(scope="module")
def band() -> LossBand:
    rng = random.Random(1)  # noqa: S311 - reproducible
    return band_of([noisy_curve(rng) for _ in range(10)])


def test_half_width_of_two_curves_uses_the_cauchy_distribution() -> None:
    band = band_of([[1.0], [3.0]])
    # Student's t with one degree of freedom: its tail of 0.005 begins at 1 / tan(0.005 pi).
    quantile = 1 / math.tan(0.005 * math.pi)
    assert band.means == [2.0]
    assert band.half_widths == [pytest.approx(quantile * math.sqrt(2) * math.sqrt(1.5))]


def test_last_window_takes_the_remaining_steps() -> None:
    band = band_of([[float(step) for step in range(23)], [0.0] * 23])
    assert len(band.windows) == len(band.means) == 11
    assert (band.windows[0], band.windows[10]) == (range(2), range(20, 23))
    # Means of (0, 1), of (20, 21, 22), and of zeros.
    assert (band.means[0], band.means[10]) == (0.25, 10.5)


def test_window_with_close_seeds_uses_the_pooled_deviation() -> None:
    band = band_of([[1.0, 1.0, 1.0], [1.0, 1.0, 3.0]])
    # Standard deviations 0, 0 and sqrt(2): pooled sqrt(2 / 3).
    assert band.half_widths[0] == band.half_widths[1]
    assert band.half_widths[2] == pytest.approx(band.half_widths[0] * math.sqrt(3))


def test_short_run_has_windows_of_one_step() -> None:
    band = band_of([[1.0, 2.0, 3.0], [2.0, 4.0, 5.0]])
    assert band.windows == [range(1), range(1, 2), range(2, 3)]
    assert band.means == [1.5, 3.0, 4.0]


@pytest.mark.parametrize(
    ("curves", "problem"),
    [
        ([], "found 0"),
        ([[1.0]], "found 1"),
        ([[1.0], [1.0, 2.0]], "found 1, 2 steps"),
        ([[], []], "found 0, 0 steps"),
        ([[1.0], [NAN]], "a loss is not finite"),
        ([[1.0], [INF]], "a loss is not finite"),
        ([[1.0], [1.0]], "two are equal, so their spread says nothing about other seeds"),
    ],
)
def test_unusable_curves_are_refused(curves: list[list[float]], problem: str) -> None:
    with pytest.raises(UsageError) as raised:
        band_of(curves)
    assert str(raised.value) == (
        f"a band needs at least two finite curves of equal length: {problem}"
    )


def test_clean_curves_leave_the_band_at_the_nominal_rate() -> None:
    rng = random.Random(0)  # noqa: S311 - reproducible
    outside = 0
    for _ in range(300):
        *others, one = [noisy_curve(rng, 60) for _ in range(7)]
        outside += judge_losses(one, band_of(others)).level.verdict is Outcome.FAIL
    # Expected: at most 3 of 300. More than 9 have a probability of 0.001.
    assert outside <= 9


def test_higher_loss_fails_at_its_first_step(band: LossBand) -> None:
    curve = [*band_curve(band)[:100], *(loss + 1 for loss in band_curve(band)[100:])]
    level = judge_losses(curve, band).level
    assert level.verdict is Outcome.FAIL
    assert level.model_extra == {"first_step": 100}
    expected, half_width = band.means[5], band.half_widths[5]
    assert level.reason == (
        f"loss {expected + 1:.4f} nats per token in steps 100 to 119 is higher than"
        f" {expected:.4f} ± {half_width:.4f} of 10 seeds"
    )


def test_loss_that_is_too_low_fails_with_a_hint(band: LossBand) -> None:
    level = judge_losses([loss - 0.5 for loss in band_curve(band)], band).level
    assert level.verdict is Outcome.FAIL
    assert level.reason is not None
    assert "lower than" in level.reason
    assert level.reason.endswith(
        ": does the input contain the label, or the training data a held-out text?"
    )


@pytest.mark.parametrize("loss", [NAN, INF, -INF])
def test_non_finite_loss_fails_at_any_length(band: LossBand, loss: float) -> None:
    level = judge_losses([1.0, 1.0, loss], band).level
    assert level.verdict is Outcome.FAIL
    assert level.model_extra == {"first_step": 2}
    assert level.compared == 3
    assert level.reason == f"the loss of step 2 is {loss}"


@pytest.mark.parametrize("length", [0, 199, 201])
def test_curve_of_another_length_is_not_compared(band: LossBand, length: int) -> None:
    level = judge_losses([1.0] * length, band).level
    assert level.verdict is Outcome.NOT_COMPARED
    assert level.reason == f"the run has {length} steps, the band 200"


def test_pass_reports_the_resolution(band: LossBand) -> None:
    level = judge_losses(band_curve(band), band).level
    assert level.verdict is Outcome.PASS
    assert level.compared == 200
    assert level.reason == (
        f"inside the band of 10 seeds; changes below {max(band.half_widths):.4f} nats per token can be missed"
    )


def band_curve(band: LossBand) -> list[float]:
    """The curve of the band's means."""
    return [mean for mean, steps in zip(band.means, band.windows, strict=True) for _ in steps]
