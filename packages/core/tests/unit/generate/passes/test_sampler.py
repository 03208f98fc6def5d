"""From logits to scores, on the reference's own logits."""

import math

import pytest
import torch
from torch import Tensor

from assay.generate.passes.generation_loop import OutputError
from assay.generate.passes.passes import Side, Work
from assay.generate.passes.sampler import SCORE_TOLERANCE, compare_scores, processed_scores
from assay.inputs import Batch
from assay.locating.matching.running_parts import BatchSource

LOGITS = torch.tensor([4.0, 3.0, 2.0, 1.0, 0.0])


@pytest.fixture
def work(batch: Batch) -> Work:
    return Work(batch, BatchSource(batch.number))


def scores_of(side: Side, work: Work, **sampling: float) -> Tensor:
    """Scores of the first five ids; all others have very low logits."""
    logits = torch.full((2, 3, side.loaded.vocab_size), -1000.0)
    logits[..., :5] = LOGITS
    tokens = torch.tensor([[0, 1, 2], [2, 1, 0]])
    return processed_scores(side, work, tokens, logits, {"do_sample": True, **sampling})


def test_generation_loop_that_never_asks_for_scores_has_none(
    side: Side, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side.loaded.model, "generate", lambda *_, **__: None, raising=False)

    with pytest.raises(OutputError, match="does not call its argument custom_generate"):
        scores_of(side, work)


def test_temperature_divides_the_logits(side: Side, work: Work) -> None:
    scores = scores_of(side, work, temperature=0.5, top_k=0)

    assert torch.equal(scores[..., :5], (LOGITS / 0.5).expand(2, 3, 5))


def test_top_k_excludes_all_others(side: Side, work: Work) -> None:
    scores = scores_of(side, work, top_k=2)

    assert scores[0, 0, :5].tolist() == [4.0, 3.0, -math.inf, -math.inf, -math.inf]


def test_top_p_keeps_the_smallest_set_of_that_mass(side: Side, work: Work) -> None:
    # Probabilities: 0.64, 0.23, 0.09, ...: the first two hold 0.87, three 0.95.
    scores = scores_of(side, work, top_p=0.9, top_k=0)

    assert scores[0, 0, :5].tolist() == [4.0, 3.0, 2.0, -math.inf, -math.inf]


def test_repetition_penalty_sees_the_tokens_before_each_step(side: Side, work: Work) -> None:
    scores = scores_of(side, work, repetition_penalty=2.0, top_k=0)

    # Row 0 continues with 0, 1, 2: at step 1 token 0 was seen, at step 2 tokens 0 and 1.
    assert scores[0, :, 0].tolist() == [4.0, 2.0, 2.0]
    assert scores[0, :, 1].tolist() == [3.0, 3.0, 1.5]


def test_greedy_decoding_leaves_the_logits_but_for_the_end_of_the_text(
    side: Side, work: Work
) -> None:
    logits = torch.randn(2, 3, side.loaded.vocab_size, generator=torch.Generator().manual_seed(0))

    scores = processed_scores(side, work, torch.zeros(2, 3, dtype=torch.long), logits, {})

    eos = list(side.loaded.eos_token_ids)
    assert bool(scores[..., eos].isneginf().all())
    scores[..., eos] = logits[..., eos]
    assert torch.equal(scores, logits)


def score(*values: float) -> Tensor:
    return torch.tensor([[values]])


def test_equal_scores_agree() -> None:
    difference = compare_scores(score(4, 3, -math.inf), score(4, 3, -math.inf))

    assert (difference.num_tokens, difference.num_masked_differently) == (1, 0)
    assert difference.largest == 0.0
    assert difference.agrees


def test_difference_is_measured_against_the_largest_score_of_the_token() -> None:
    difference = compare_scores(score(4, 3.5), score(4, 3))

    assert difference.largest == 0.125
    assert not difference.agrees


@pytest.mark.parametrize(("factor", "agrees"), [(0.9, True), (1.1, False)])
def test_few_roundings_are_allowed(factor: float, *, agrees: bool) -> None:
    expected = torch.tensor([[[1.0, 0.0]]], dtype=torch.float64)
    actual = expected + factor * SCORE_TOLERANCE * torch.tensor([0.0, 1.0], dtype=torch.float64)

    assert compare_scores(actual, expected).agrees is agrees


@pytest.mark.parametrize("excluded", ["more", "fewer", "others"])
def test_other_excluded_ids_disagree(excluded: str) -> None:
    actual = {
        "more": score(4, -math.inf, -math.inf),
        "fewer": score(4, 3, 2),
        "others": score(4, -math.inf, 2),
    }[excluded]

    difference = compare_scores(actual, score(4, 3, -math.inf))

    assert difference.num_masked_differently == (2 if excluded == "others" else 1)
    assert not difference.agrees


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_score_that_is_not_finite_disagrees(value: float) -> None:
    assert not compare_scores(score(4, value), score(4, 3)).agrees


def test_scores_that_exclude_everything_on_both_sides_agree() -> None:
    nothing = score(-math.inf, -math.inf)

    assert compare_scores(nothing, nothing).agrees


def test_all_zero_scores_agree_and_any_other_number_does_not() -> None:
    assert compare_scores(score(0, 0), score(0, 0)).agrees
    assert not compare_scores(score(0, 1e-20), score(0, 0)).agrees
