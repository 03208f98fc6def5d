"""Factors, transpositions and other orders that explain a difference of two tensors."""

import pytest
import torch
from torch import Tensor

from assay.value_changes import OF_RESULT, OF_WEIGHT, Proof, describe_values

ORDERS = {"rows": 0, "columns": 1}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def describe(
    actual: Tensor, expected: Tensor, nouns: tuple[str, str] = OF_WEIGHT, noise: float = 1e-6
) -> str:
    return describe_values(actual, expected, Proof(noise, 2.0**-24), nouns)


@pytest.mark.parametrize(
    ("factor", "text"),
    [
        (1.1, "It is 1.1 times the expected one."),
        (1.0003, "It is 1.0003 times the expected one."),
        (-1.0, "It is -1 times the expected one."),
        (0.0, "It is zero."),
    ],
)
def test_a_factor_is_stated(factor: float, text: str) -> None:
    weight = random(16, 12)
    assert describe(factor * weight, weight) == text


def test_a_factor_of_a_bfloat16_weight_is_stated() -> None:
    weight = random(64, 64).bfloat16()
    actual = (1.02 * weight.float()).bfloat16().float()
    proof = Proof(4 * 2.0**-8, 2.0**-8)
    assert describe_values(actual, weight.float(), proof, OF_WEIGHT) == (
        "It is 1.02 times the expected one."
    )


def test_a_factor_of_some_rows_and_columns_counts_them() -> None:
    expected = random(16, 12)
    actual = expected.clone()
    actual[2:5] *= 1.5
    assert describe(actual, expected) == "It is 1.5 times the expected one in 3 of 16 rows."
    actual = expected.clone()
    actual[2:5, :6] *= 1.5
    assert describe(actual, expected, OF_RESULT) == (
        "It is 1.5 times the expected one in 3 of 16 tokens and 6 of 12 channels."
    )


def test_a_factor_with_a_rest_beyond_noise_is_not_stated() -> None:
    expected = random(16, 12)
    assert not describe(1.1 * expected + 1e-4 * random(16, 12, seed=1), expected)


@pytest.mark.parametrize("noise", [1e-6, 0.1])
def test_an_added_difference_is_not_described(noise: float) -> None:
    """With 10% noise, half of the expected values and unrelated values may look like a factor."""
    expected = random(64, 32)
    for share in (0.2, 0.5, 1.0):
        assert not describe(expected + share * random(64, 32, seed=1), expected, OF_RESULT, noise)


def test_a_difference_within_noise_is_not_described() -> None:
    expected = random(16, 12)
    assert not describe(1.0000005 * expected, expected)


@pytest.mark.parametrize("noun", ["rows", "columns"])
def test_another_order_counts_what_moved(noun: str) -> None:
    expected = random(16, 12)
    actual = expected.roll(1, ORDERS[noun])
    size = expected.shape[ORDERS[noun]]
    text = f"Its {noun} are in another order: {size} of {size} moved."
    assert describe(actual, expected) == text


def test_two_rows_are_swapped() -> None:
    expected = random(16, 12)
    order = list(range(16))
    order[3], order[9] = 9, 3
    assert describe(expected[order], expected) == "Its rows 3 and 9 are swapped."
    assert describe(expected[order], expected, OF_RESULT) == (
        "Its tokens are in another order: 2 of 16 moved."
    )
    assert describe(expected.T[:, order], expected.T, OF_RESULT) == (
        "Its channels 3 and 9 are swapped."
    )


def test_rows_of_more_columns_than_directions_are_found() -> None:
    expected = random(200, 500)
    noisy = expected.flip(0) + 1e-3 * random(200, 500, seed=1)
    assert describe(noisy, expected, noise=1e-2) == (
        "Its rows are in another order: 200 of 200 moved."
    )


def test_a_vector_needs_the_same_values_in_another_order() -> None:
    expected = random(16, 1)
    assert describe(expected.flip(0), expected) == (
        "Its rows are in another order: 16 of 16 moved."
    )
    near = expected.flip(0) + 1e-5
    assert not describe(near, expected, noise=1e-3)


def test_repeated_rows_are_not_another_order() -> None:
    expected = random(16, 12)
    assert not describe(expected[torch.arange(16) // 2], expected)


def test_few_distinct_values_are_not_another_order() -> None:
    expected = torch.arange(16).remainder(3).float()[:, None].repeat(1, 12)
    assert not describe(expected.roll(1, 0), expected)


def test_a_transposed_weight_is_named() -> None:
    expected = random(12, 12)
    assert describe(expected.T, expected) == "It is the transpose of the expected one."
    assert not describe(expected.T, expected, OF_RESULT)


@pytest.mark.parametrize("shape", [(7, 12), (1, 64)])
def test_fewer_than_eight_rows_are_not_described(shape: tuple[int, int]) -> None:
    expected = random(*shape)
    assert not describe(1.1 * expected, expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_not_finite_are_not_described(value: float) -> None:
    expected = random(16, 12)
    actual = 1.1 * expected
    actual[3, 3] = value
    assert not describe(actual, expected)
