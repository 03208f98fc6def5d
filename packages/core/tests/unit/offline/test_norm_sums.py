"""Norms in float32 against sums in float64."""

import math

import pytest
import torch
from torch import Tensor

from assay.blocks import BLOCK_BYTES
from assay.metrics import PairSums
from assay.offline.measuring.norm_sums import NormSums

ROWS, WIDTH = 600, 700
PROMPT, POSITION = torch.zeros(ROWS, dtype=torch.long), torch.arange(ROWS)


def both(actual: Tensor, expected: Tensor) -> tuple[NormSums, PairSums]:
    found = NormSums(), PairSums()
    for sums in found:
        sums.add(actual, expected, PROMPT, POSITION)
    return found


def pair(error: float = 1e-3, size: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    expected = size * torch.randn(ROWS, WIDTH, generator=generator)
    return expected * (1 + error * torch.randn(ROWS, WIDTH, generator=generator)), expected


@pytest.mark.parametrize(
    ("actual_dtype", "expected_dtype"),
    [
        (torch.float32, torch.float32), (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16), (torch.float32, torch.float64),
    ],
)  # fmt: skip
def test_norms_and_rows_equal_those_of_pair_sums(
    actual_dtype: torch.dtype, expected_dtype: torch.dtype
) -> None:
    actual, expected = pair()
    norms, sums = both(actual.to(actual_dtype), expected.to(expected_dtype))
    assert norms.relative_error == pytest.approx(sums.relative_error, rel=1e-5)
    assert norms.num_elements == sums.num_elements
    assert norms.worst == sums.worst
    assert norms.worst_row() == pytest.approx(sums.worst_row(), rel=1e-5)
    assert norms.channel is None  # not computed


@pytest.mark.parametrize("size", [1e-30, 1e-10, 1e25])
def test_sizes_that_float32_cannot_square_are_summed_in_float64(size: float) -> None:
    norms, sums = both(*pair(size=size))
    assert norms.relative_error == sums.relative_error > 0
    assert norms.worst == sums.worst


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_counted(value: float) -> None:
    actual, expected = pair()
    actual[3, 5] = value
    norms, sums = both(actual, expected)
    assert (norms.num_nan, norms.num_inf) == (sums.num_nan, sums.num_inf)
    assert norms.num_nan + norms.num_inf == 1
    assert math.isnan(norms.relative_error)


def test_a_side_of_zeros() -> None:
    zeros = torch.zeros(ROWS, WIDTH)
    assert both(zeros, zeros)[0].relative_error == 0.0
    assert both(zeros + 1e-30, zeros)[0].relative_error == math.inf


def test_small_calls_are_collected() -> None:
    actual, expected = pair()
    norms, sums = NormSums(), PairSums()
    for one in (norms, sums):
        for row in range(40):
            at = slice(row, row + 1)
            one.add_later(actual[at], expected[at], PROMPT[at], POSITION[at])
        one.flush()
    assert (norms.num_calls, norms.num_elements) == (sums.num_calls, sums.num_elements)
    assert norms.relative_error == pytest.approx(sums.relative_error, rel=1e-5)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_rows_longer_than_a_block_are_added_up(num_rows: int) -> None:
    width = 2 * BLOCK_BYTES // 4 + 5
    expected = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(0))
    actual = expected * 1.01
    actual[-1, -2] += 9
    norms, sums = NormSums(), PairSums()
    for one in (norms, sums):
        one.add(actual, expected, PROMPT[:num_rows], POSITION[:num_rows])
    assert norms.relative_error == pytest.approx(sums.relative_error, rel=1e-5)
    assert norms.worst.difference == pytest.approx(sums.worst.difference, rel=1e-6)
    assert norms.worst.index == sums.worst.index == (0, num_rows - 1, width - 2)


def test_numbers_do_not_depend_on_the_number_of_threads() -> None:
    generator = torch.Generator().manual_seed(0)
    expected = torch.randn(50, 1 << 18, generator=generator)
    actual = expected + 1e-3 * torch.randn(50, 1 << 18, generator=generator)
    before, found = torch.get_num_threads(), []
    for num_threads in (1, 3):
        torch.set_num_threads(num_threads)
        norms = NormSums()
        norms.add(actual, expected, PROMPT[:50], POSITION[:50])
        found.append((norms.dd, norms.ee, norms.worst, norms.rows[0].error.tolist()))
    torch.set_num_threads(before)
    assert found[0] == found[1]
