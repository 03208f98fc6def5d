"""Near ties of a router: choices that only differ because the scores are nearly equal."""

import pytest
import torch
from torch import Tensor

from assay.locating.matching.routing import TIE_MARGIN, columns_in_order, find_scores, near_tie_rows

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


def test_same_experts_in_another_order_are_put_in_order_and_others_are_left() -> None:
    expected = torch.tensor([[0, 1, 2], [0, 1, 2], [3, 1, 0], [0, 1, 2], [0, 1, 2]])
    actual = torch.tensor([[2, 0, 1], [2, 3, 0], [3, 1, 0], [2, 2, 0], [7, 5, 1]])

    columns = columns_in_order(actual, expected)

    assert columns is not None
    in_order = actual.gather(1, columns).tolist()
    assert in_order == [[0, 1, 2], [0, 3, 2], [3, 1, 0], [2, 2, 0], [7, 1, 5]]
    assert columns_in_order(expected, expected) is None
