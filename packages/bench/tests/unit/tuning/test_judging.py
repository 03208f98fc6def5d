import math
from collections.abc import Mapping
from typing import Any

import pytest

from assay.verdicts import Outcome
from assay_bench.tuning.judging import judge_by_baseline, judge_learning, judge_tunings
from assay_bench.tuning.recipe import DataSource, Permutation, TuningRecipe
from assay_bench.tuning.records import Measured, ModelStart, StepLoss, Tuning, TuningRecord

RECIPE = TuningRecipe(
    models=["micro:llama"],
    run="cpu/float32",
    seeds=[0, 1],
    steps=2,
    batch_size=4,
    sequence_length=16,
    checkpoint_every=1,
    data=[DataSource(source="sums", share=3.0), DataSource(source="standard-library")],
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


BASELINE = [tuning(3.0, 2.0, seed=1), tuning(3.2, 2.2, seed=2), tuning(3.1, 2.1, seed=3)]


def test_more_probable_held_out_text_passes() -> None:
    level = judge_learning(tuning()).level
    assert level.verdict is Outcome.PASS
    # 3/4 of 4.3 and 1/4 of 1.05; 3/4 of 2.25 and 1/4 of 1.25.
    assert level.reason is not None
    assert level.reason.startswith(
        "held-out loss 3.4875 before and 2.0000 nats per token after 2 steps (p = "
    )
    assert level.compared == 4


@pytest.mark.parametrize("after", [BEFORE, {**BEFORE, "sums": [3.0, 5.0, 4.0, 5.1]}])
def test_chance_improvement_is_not_learning(after: dict[str, list[float]]) -> None:
    assert judge_learning(tuning(after=after)).level.verdict is Outcome.FAIL


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_non_finite_loss_fails_in_spite_of_learning(loss: float) -> None:
    verdict, _ = judge_tunings([tuning(3.0, loss)], None)
    assert verdict.verdict is Outcome.FAIL
    assert verdict.diagnosis == "non-finite"
    (level,) = verdict.levels.values()
    assert level.reason == f"the loss of step 1 is {loss}"


def test_losses_are_judged_by_the_baseline() -> None:
    verdict, rows = judge_tunings([tuning(3.05, 2.05, seed=9)], BASELINE)
    assert {name: level.verdict for name, level in verdict.levels.items()} == {
        "micro:llama full seed 9: learned": Outcome.PASS,
        "micro:llama full seed 9: losses": Outcome.PASS,
    }
    assert verdict.compared == 4 + 2
    assert [row.level for row in rows] == ["micro:llama full seed 9: learned"]
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
            "the baseline has different batches: {'steps': 2, 'batch_size': 4,",
        ),
        (
            tuning(recipe={"permutations": {"full": Permutation(learning_rate=1e-2)}}),
            "the baseline has different learning rate or features: {'learning_rate': 0.001,",
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
    assert verdict.unmatched.expected == ["micro:llama full seed 0: losses"]


def test_notes_report_perplexities() -> None:
    verdict, _ = judge_tunings([tuning()], None)
    # exp of 4.3, 2.25, 1.05 and 1.25.
    perplexities, cost = verdict.notes
    assert perplexities == (
        "micro:llama full seed 0: perplexity per token on held-out text:"
        " sums 73.700 -> 9.488, standard-library 2.858 -> 3.490"
    )
    assert cost == "micro:llama full seed 0: 120 tokens in 1 s"
