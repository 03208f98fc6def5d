"""Near ties of a router, and what takes the place of a choice that noise explains."""

import pytest
import torch
from torch import Tensor

from assay.hooks.expert_choices import ExpertChoice, Selection
from assay.replay.routing import (
    TIE_MARGIN,
    ChoiceRecorder,
    NearTieChoices,
    NoiseOfChoices,
    RecordedChoice,
    ScoreNoise,
    columns_in_order,
    find_scores,
    near_tie_rows,
    read_choices,
    within_noise,
)

# Four experts, two for each token. The first token is clear, the second's second place is nearly
# tied, the third's is clear.
SCORES = torch.tensor([[4.0, 3.0, 1.0, 0.0], [4.0, 2.01, 2.0, 0.0], [4.0, 3.0, 1.0, 0.0]])
CHOSEN = torch.tensor([[0, 1], [0, 1], [0, 1]])
ERROR = 0.01


def ties(actual: Tensor, error: float = ERROR) -> list[bool]:
    return [bool(row) for row in near_tie_rows(actual, CHOSEN, SCORES, error)]


def test_same_choice_is_no_tie_to_be_left_out() -> None:
    assert ties(CHOSEN) == [False, False, False]


def test_order_of_the_chosen_does_not_matter() -> None:
    assert ties(CHOSEN.flip(-1)) == [False, False, False]


def test_other_choice_between_nearly_equal_scores_is_left_out() -> None:
    assert ties(torch.tensor([[0, 1], [0, 2], [0, 1]])) == [False, True, False]


def test_other_choice_between_clear_scores_is_an_error() -> None:
    assert ties(torch.tensor([[0, 2], [0, 2], [1, 3]])) == [False, True, False]


def test_margin_is_measured_in_errors_of_the_scores() -> None:
    flipped = torch.tensor([[0, 2], [0, 2], [0, 2]])
    margins = [2.0, 0.01, 2.0]
    size = max(margins) / TIE_MARGIN

    assert ties(flipped, 1.01 * size) == [True, True, True]
    assert ties(flipped, 0.99 * size) == [False, True, False]


def test_exact_scores_allow_no_other_choice() -> None:
    assert ties(torch.tensor([[0, 1], [0, 2], [0, 1]]), 0.0) == [False, False, False]


def test_order_of_equal_scores_is_a_tie_and_that_of_clear_ones_is_not() -> None:
    everything = torch.tensor([[0, 1, 2, 3]])
    equal, clear = torch.zeros(1, 4), torch.tensor([[4.0, 3.0, 2.0, 1.0]])

    assert near_tie_rows(everything.flip(-1), everything, equal, 1e-3).all()
    assert not near_tie_rows(everything.flip(-1), everything, clear, 1e-3).any()


def test_rows_not_chosen_by_these_scores_are_not_excused() -> None:
    # Group-limited routing: the recorded choice is not the largest two.
    expected = torch.tensor([[0, 3]])

    assert not near_tie_rows(torch.tensor([[0, 1]]), expected, SCORES[:1], ERROR).any()


def test_noise_that_is_not_a_number_excuses_nothing() -> None:
    flipped = torch.tensor([[0, 1], [0, 2], [0, 1]])

    assert ties(flipped, float("nan")) == [False, False, False]


def test_scores_are_found_among_the_other_results() -> None:
    weights = torch.tensor([[0.7, 0.3]] * 3)

    assert find_scores(CHOSEN, {"output.1": weights, "output.0": SCORES}) == "output.0"


@pytest.mark.parametrize(
    "siblings",
    [
        {},
        {"output.0": torch.zeros(2, 4)},
        {"output.0": torch.zeros(3, 2)},
        {"output.0": -SCORES},
        {"output.0": SCORES.long()},
        {"output.0": SCORES[0]},
    ],
    ids=["none", "other rows", "no more than chosen", "not the largest", "whole numbers", "a row"],
)
def test_no_scores_are_found_where_there_are_none(siblings: dict[str, Tensor]) -> None:
    assert find_scores(CHOSEN, siblings) is None


def test_rows_with_fewer_visible_keys_than_are_chosen_decide_nothing() -> None:
    masked = torch.tensor([[0.1, -torch.inf, -torch.inf]] * 2 + [[0.1, 0.3, 0.2]])
    assert find_scores(torch.tensor([[0, 2], [0, 1], [1, 2]]), {"a": masked}) == "a"
    assert find_scores(torch.tensor([[0, 2], [0, 1]]), {"a": masked[:2]}) is None


def test_same_experts_in_another_order_are_put_in_order_and_others_are_left() -> None:
    expected = torch.tensor([[0, 1, 2], [0, 1, 2], [3, 1, 0], [0, 1, 2], [0, 1, 2]])
    actual = torch.tensor([[2, 0, 1], [2, 3, 0], [3, 1, 0], [2, 2, 0], [7, 5, 1]])

    columns = columns_in_order(actual, expected)

    assert columns is not None
    in_order = actual.gather(1, columns).tolist()
    assert in_order == [[0, 1, 2], [0, 3, 2], [3, 1, 0], [2, 2, 0], [7, 1, 5]]
    assert columns_in_order(expected, expected) is None


NOISE_ERROR = 0.01
FAR = 2 * TIE_MARGIN * NOISE_ERROR
NEAR = 0.5 * TIE_MARGIN * NOISE_ERROR


def choose(scores: Tensor, count: int = 2) -> Tensor:
    return scores.topk(count).indices


def choice_of(scores: Tensor, indices: Tensor, *before: Selection) -> ExpertChoice:
    weights = torch.full(indices.shape, 0.5)
    selections = (*before, Selection(scores, indices.shape[1]))
    return ExpertChoice("experts", 0, 0, indices, weights, selections)


# Experts 0 and 1 are chosen; 2 is nearly as good as 1, and 3 is far from all.
SCORES_OF_EXPERTS = torch.tensor([[3.0, 1.0, 1.0 - NEAR, 1.0 - FAR]])
RECORDED = RecordedChoice.of(choice_of(SCORES_OF_EXPERTS, choose(SCORES_OF_EXPERTS)))


def is_noise(*indices: int, noise: float = NOISE_ERROR) -> bool:
    return bool(within_noise(torch.tensor([indices]), RECORDED, ScoreNoise(noise, 0.0)))


@pytest.mark.parametrize("indices", [(0, 1), (1, 0), (0, 2), (2, 0)])
def test_expert_with_a_nearly_equal_score_may_take_the_place(indices: tuple[int, ...]) -> None:
    assert is_noise(*indices)


@pytest.mark.parametrize(
    "indices", [(0, 3), (1, 2), (0, 0), (0, 7), (2, 2)], ids=["far", "best", "twice", "none", "tie"]
)
def test_any_other_choice_is_no_noise(indices: tuple[int, ...]) -> None:
    assert not is_noise(*indices)


def test_margin_is_that_of_the_router_s_own_noise() -> None:
    assert not is_noise(0, 2, noise=NOISE_ERROR / 3)
    assert is_noise(0, 3, noise=3 * NOISE_ERROR)


def test_scores_that_decide_are_those_picked_from_and_not_those_before_the_correction() -> None:
    uncorrected = torch.tensor([[1.0, 2.0, 3.0, 4.0]])

    found = RecordedChoice.of(
        choice_of(SCORES_OF_EXPERTS, choose(SCORES_OF_EXPERTS), Selection(uncorrected, 1))
    )

    assert found.scores is not None
    assert torch.equal(found.scores, SCORES_OF_EXPERTS)
    assert found.groups is None


def test_choice_that_no_scores_explain_is_no_near_tie() -> None:
    unexplained = RecordedChoice.of(choice_of(-SCORES_OF_EXPERTS, choose(SCORES_OF_EXPERTS)))

    assert unexplained.scores is None
    assert not within_noise(torch.tensor([[0, 2]]), unexplained, ScoreNoise(NOISE_ERROR, 0.0))


# Four groups of two experts, two of them open: 0 and 1. Group 2 is nearly as good as 1, group 3 far.
GROUPS = torch.tensor([[5.0, 2.0, 2.0 - NEAR, 2.0 - FAR]])
OPEN = torch.tensor([[3.0, 2.0, 1.0, 1.0 - FAR, 0.0, 0.0, 0.0, 0.0]])
GROUPED = RecordedChoice.of(choice_of(OPEN, choose(OPEN, 3), Selection(GROUPS, 2)))


@pytest.mark.parametrize(
    ("indices", "expected"),
    [
        ((0, 1, 2), True),
        ((0, 1, 4), True),  # the nearly equal group in place of 1
        ((0, 1, 5), True),
        ((0, 1, 3), False),  # within an open group, but far
        ((0, 1, 6), False),  # a group that is far
        ((0, 2, 4), False),  # three groups: the limit is ignored
        ((0, 4, 5), True),
        ((2, 4, 5), False),  # the best group is left out
    ],
)
def test_group_of_experts_may_be_replaced_by_a_nearly_equal_one(
    indices: tuple[int, ...], expected: bool
) -> None:
    noise = ScoreNoise(NOISE_ERROR, NOISE_ERROR)

    assert GROUPED.groups is not None
    assert bool(within_noise(torch.tensor([indices]), GROUPED, noise)) is expected


def test_candidate_gets_the_recorded_choice_in_place_of_near_ties_only() -> None:
    scores = SCORES_OF_EXPERTS.expand(3, 4)
    recorder = ChoiceRecorder()
    recorder.choose(choice_of(scores, choose(scores)))
    recorded = read_choices(recorder.to_tensors())
    actual = torch.tensor([[0, 1], [2, 0], [0, 3]])
    handler = NearTieChoices({"experts": ScoreNoise(NOISE_ERROR, 0.0)}, recorded)

    chosen = handler.choose(
        ExpertChoice("experts", 0, 0, actual, torch.tensor([[0.7, 0.3]] * 3).bfloat16())
    )

    assert chosen is not None
    indices, weights = chosen
    assert indices.tolist() == [[0, 1], [0, 1], [0, 3]]
    assert weights.dtype is torch.bfloat16
    assert weights[1].tolist() == [0.5, 0.5]
    assert torch.equal(weights[[0, 2]], torch.tensor([[0.7, 0.3]] * 2).bfloat16())
    assert handler.num_replaced == 1


def test_same_experts_in_another_order_keep_their_own_weights() -> None:
    handler = NearTieChoices(
        {"experts": ScoreNoise(NOISE_ERROR, 0.0)}, {(0, 0, "experts"): RECORDED}
    )

    assert handler.choose(choice_of(SCORES_OF_EXPERTS, torch.tensor([[1, 0]]))) is None


def test_noise_run_measures_its_scores_and_goes_on_with_the_recorded_choice() -> None:
    handler = NoiseOfChoices({(0, 0, "experts"): RECORDED})

    same = handler.choose(choice_of(SCORES_OF_EXPERTS + 0.25, choose(SCORES_OF_EXPERTS)))
    other = handler.choose(choice_of(SCORES_OF_EXPERTS + 0.25, torch.tensor([[0, 3]])))

    assert same is None
    assert other is not None
    assert other[0].tolist() == RECORDED.indices.tolist()
    assert handler.noise()["experts"].scores == pytest.approx(0.25)


def test_row_of_a_batch_is_cut_out() -> None:
    scores = torch.arange(24.0).reshape(6, 4)
    batch = RecordedChoice.of(choice_of(scores, choose(scores)))

    second = batch.select_row(1, 2)

    assert second.scores is not None
    assert torch.equal(second.scores, scores[3:])
    assert second.indices.shape == (3, 2)
    assert batch.select_row(None, 2) is batch
