import pytest
import torch

from assay.training.replay.observing.observed_gradients import shares_of_ranks


def products(*shares: float) -> torch.Tensor:
    """Products and squares of one parameter whose ranks have these shares, (2, ranks)."""
    return torch.tensor([shares, [1.0] * len(shares)], dtype=torch.float64)


def test_a_share_that_all_parameters_have_is_the_rank_s() -> None:
    assert shares_of_ranks([products(1, 0), products(1, 0.02)]) == pytest.approx([1, 0.01])


def test_a_share_of_some_parameters_only_belongs_to_no_rank() -> None:
    assert shares_of_ranks([products(1, 1), products(1, 0)]) == [1, 1]


def test_without_ranks_there_are_no_shares() -> None:
    assert shares_of_ranks([]) == []
