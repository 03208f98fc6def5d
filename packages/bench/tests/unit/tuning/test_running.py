"""Verdicts of tunings."""

import math
import re
from collections.abc import Mapping
from typing import Any

import pytest

from assay.verdicts import Outcome
from assay_bench.tuning.records import (
    DataSource,
    Measured,
    ModelStart,
    Permutation,
    StepLoss,
    TuningRecipe,
    TuningRecord,
)
from assay_bench.tuning.running import judge_tunings

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
) -> TuningRecord:
    values = losses or (3.0, 2.0)
    kept = RECIPE.model_copy(update={"steps": len(values), **(recipe or {})})
    began = ModelStart(data_hash={"sums": "s"}, weights_hash="w", held_out=BEFORE)
    return TuningRecord(
        schema=1,
        recipe=kept,
        model="micro:llama",
        permutation="full",
        seed=seed,
        start=began.model_copy(update=start or {}),
        end=Measured(weights_hash="t", held_out=dict(after)),
        candidate={},
        losses=[
            StepLoss(step=step, loss=loss, learning_rate=1e-3, tokens=60, seconds=0.5)
            for step, loss in enumerate(values)
        ],
        provenance={},
    )


def test_more_probable_held_out_text_passes() -> None:
    verdict, _ = judge_tunings([tuning()])
    assert verdict.verdict is Outcome.PASS
    assert verdict.headline == "Each tuned model learned its mixture and kept each source."
    learned, sums, library = verdict.levels.values()
    # 3/4 of 4.3 and 1/4 of 1.05; 3/4 of 2.25 and 1/4 of 1.25. Changes of rows: -1.45, -1.525, -1.45, -1.525. Their
    # deviation is 0.075 / sqrt(3), and Student's t with three degrees of freedom exceeds 4.5407 in 1 %.
    assert learned.reason == (
        "held-out loss 3.4875 before and 2.0000 nats per token after 2 steps (perplexity 32.7 -> 7.389):"
        " the change is at most -1.3892, below the limit of -0.01"
    )
    assert learned.compared == 4
    # Changes -2, -2.1, -2, -2.1: -2.05 + 4.5407 * 0.1 / sqrt(3) / 2.
    assert str(sums.reason).endswith("the change is at most -1.9189, below the limit of 0.1")
    assert str(library.reason).endswith("the change is at most +0.2000, below the limit of 0.3")


def test_part_that_is_forgotten_fails_and_is_named_although_the_mixture_is_learned() -> None:
    # exp(1.194) = 3.3, exp(5.268) = 194.
    start = {"held_out": BEFORE | {"standard-library": [1.194] * 4}}
    found = tuning(start=start, after=AFTER | {"standard-library": [5.1, 5.2, 5.3, 5.472]})
    verdict, rows = judge_tunings([found])
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
    assert judge_tunings([tuning(after=after)])[0].verdict is expected


@pytest.mark.parametrize(
    ("fall", "expected"),
    [(0.0, Outcome.FAIL), (1e-9, Outcome.FAIL), (0.009, Outcome.FAIL), (0.011, Outcome.PASS)],
)
def test_learning_is_a_fall_by_one_percent_of_the_perplexity(
    fall: float, expected: Outcome
) -> None:
    after = {name: [loss - fall for loss in losses] for name, losses in BEFORE.items()}
    verdict, _ = judge_tunings([tuning(after=after)])
    learned = verdict.levels["micro:llama full seed 0: learned"]
    assert (verdict.verdict, learned.verdict) == (expected, expected)
    assert str(learned.reason).endswith("below the limit of -0.01")


def test_chance_improvement_is_underpowered_and_says_how_many_rows_would_decide() -> None:
    verdict, _ = judge_tunings([tuning(after={**BEFORE, "sums": [3.0, 5.0, 4.0, 5.1]})])
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert verdict.headline == (
        "underpowered: too few held-out rows to decide these levels: micro:llama full seed 0: learned,"
        " micro:llama full seed 0: held-out sums."
    )
    # Changes of sums: -1, 0.8, -0.4, 0.5, with the mean -0.025 and the deviation 0.8261. From the margin 0.1:
    # ((2.326 + 0.842) * 0.8261 / 0.125)**2 = 438.3.
    reason = verdict.levels["micro:llama full seed 0: held-out sums"].reason
    assert reason == (
        "underpowered: held-out loss 4.3000 before and 4.2750 nats per token after 2 steps (perplexity 73.7 -> 71.88):"
        " the change is between -1.9006 and +1.8506, on both sides of the limit of 0.1; about 439 rows would decide:"
        " set held_out_rows in the recipe"
    )


def test_shown_rise_fails() -> None:
    after = {**BEFORE, "sums": [4.3, 4.55, 4.7, 4.95]}
    verdict, _ = judge_tunings([tuning(after=after)])
    assert "the change is at least +0.25" in str(
        verdict.levels["micro:llama full seed 0: held-out sums"].reason
    )
    assert verdict.verdict is Outcome.FAIL


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_non_finite_loss_fails_in_spite_of_learning(loss: float) -> None:
    verdict, _ = judge_tunings([tuning(3.0, loss)])
    assert verdict.verdict is Outcome.FAIL
    assert verdict.diagnosis == "non-finite"
    reasons = {level.reason for level in verdict.levels.values()}
    assert reasons == {f"the loss of step 1 is {loss}"}


def test_notes_report_changes_and_margins() -> None:
    verdict, _ = judge_tunings([tuning()])
    *levels, cost = verdict.notes
    assert len(levels) == sum(one.verdict is Outcome.PASS for one in verdict.levels.values()) > 0
    for note in levels:
        assert "(perplexity " in note
        assert re.search(r": the change is at most [-+][\d.]+, below the limit of -?[\d.]+$", note)
    assert cost == "micro:llama full seed 0: 120 tokens in 1 s"
