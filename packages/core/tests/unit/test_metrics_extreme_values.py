"""Zero, what is not finite, and the smallest and largest numbers."""

import math

import pytest
import torch

from packages.core.tests.unit.pair_sums import matrix, sums_of

# Of expected values, by the dtype of actual ones.
STORED = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}

# Zero


def test_zero_against_zero_is_no_error() -> None:
    sums = sums_of(torch.zeros(2, 3), torch.zeros(2, 3))

    assert (sums.relative_error, sums.slope, sums.worst_row()[0]) == (0.0, 0.0, 0.0)


def test_anything_against_zero_is_an_infinite_error() -> None:
    sums = sums_of(torch.ones(2, 3), torch.zeros(2, 3))

    assert sums.relative_error == math.inf
    assert sums.worst_row()[0] == math.inf
    assert sums.slope == 0.0


def test_zero_against_anything_is_an_error_of_one() -> None:
    sums = sums_of(torch.zeros(2, 3), torch.ones(2, 3))

    assert (sums.relative_error, sums.slope, sums.worst_row()[0]) == (1.0, -1.0, 1.0)


# NaN and infinity


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_not_finite_makes_the_error_nan(value: float, dtype: torch.dtype) -> None:
    actual = matrix([1, 2], [value, 4], dtype=dtype)

    sums = sums_of(actual, matrix([1, 2], [3, 4]), prompts=[5, 6])

    assert (sums.num_nan, sums.num_inf) == ((1, 0) if math.isnan(value) else (0, 1))
    assert math.isnan(sums.relative_error)
    error, prompt, position = sums.worst_row()
    assert math.isnan(error)
    assert (prompt, position) == (6, 1)
    assert sums.dd == 0.0  # left out of the sums


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_on_both_sides_alike_agrees(value: float) -> None:
    both = matrix([1, value], [3, 4])

    sums = sums_of(both, both.clone())

    assert (sums.num_nan, sums.num_inf) == (0, 0)
    assert (sums.relative_error, sums.worst_row()[0]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [(1.0, math.inf), (1.0, math.nan), (-math.inf, math.inf), (math.nan, math.inf)],
    ids=["finite for inf", "finite for nan", "other sign", "nan for inf"],
)
def test_row_with_another_value_where_the_expected_is_not_finite_is_the_worst(
    actual: float, expected: float
) -> None:
    sums = sums_of(matrix([1, 2], [3, actual]), matrix([1, 2], [3, expected]))

    assert math.isnan(sums.worst_row()[0])
    assert sums.worst_row()[2] == 1


def test_values_that_are_not_finite_do_not_hide_an_error_elsewhere() -> None:
    expected = torch.ones(64, 2)
    actual = expected.clone()
    actual[0, 0] = math.nan
    actual[1:, 1] = 2.0

    sums = sums_of(actual, expected)

    assert sums.dd == 63.0
    assert float(sums.bins[0].sum()) == 127.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compared_tensors_are_left_as_they_were(dtype: torch.dtype) -> None:
    actual = matrix([1, math.nan], [math.inf, 4], dtype=dtype)
    expected = matrix([1, 2], [math.inf, 4], dtype=STORED[dtype])
    copies = actual.clone(), expected.clone()

    sums_of(actual, expected)

    assert torch.equal(actual.nan_to_num(nan=-1.0), copies[0].nan_to_num(nan=-1.0))
    assert torch.equal(expected, copies[1])


# Denormal, tiny and huge values


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("exponent", [-131, -126, -100, -60, -20, 0, 60, 119])
def test_error_of_half_is_a_half_at_every_magnitude(dtype: torch.dtype, exponent: int) -> None:
    # Powers of two and 1.5 times them: exact also where they are denormal.
    expected = torch.full((4, 8), 2.0**exponent, dtype=torch.float64)
    actual = (1.5 * expected).to(dtype)
    stored = expected.to(STORED[dtype])

    sums = sums_of(actual, stored)

    assert sums.relative_error == pytest.approx(0.5, rel=1e-6)
    assert sums.slope == pytest.approx(0.5, rel=1e-6)
    assert sums.slope_standard_error == pytest.approx(0.5 / math.sqrt(32), rel=1e-6)
    assert sums.worst_row()[0] == pytest.approx(0.5, rel=1e-6)
    assert sums.bin_bias()[0] == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lowest_numbers_of_a_mask_agree_and_hide_no_error(dtype: torch.dtype) -> None:
    stored = STORED[dtype]
    lowest = max(torch.finfo(stored).min, torch.finfo(torch.float64).min)
    expected = torch.tensor([[lowest, 1.0, 1.0, 1.0, 1.0]], dtype=stored)
    actual = torch.tensor([[torch.finfo(dtype).min, 1.5, 1.5, 1.5, 1.5]], dtype=dtype)

    sums = sums_of(actual, expected)

    assert (sums.relative_error, sums.slope) == (0.5, 0.5)
    assert sums.worst_row()[0] == 0.5


@pytest.mark.parametrize("value", [0.0, 1e4, math.inf, math.nan])
def test_another_number_where_the_mask_is_lowest_is_the_worst_row(value: float) -> None:
    lowest = torch.finfo(torch.float32).min
    sums = sums_of(torch.tensor([[value, 1.0]]).bfloat16(), torch.tensor([[lowest, 1.0]]))

    assert math.isnan(sums.worst_row()[0])


def test_largest_float16_values_that_are_no_mask_are_compared() -> None:
    sums = sums_of(torch.full((2, 2), 48000.0).half(), torch.full((2, 2), 32000.0))

    assert sums.relative_error == 0.5


def test_smallest_float64_values_are_not_a_silent_zero() -> None:
    tiny = torch.full((4, 8), 2.0**-400, dtype=torch.float64)

    assert sums_of(1.5 * tiny, tiny).relative_error == pytest.approx(0.5)
