from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from assay import blocks
from assay.blocks import BlockSums, count_misrounded, sum_pair


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def pair(rows: int, channels: int) -> tuple[Tensor, Tensor]:
    """Small whole numbers: every sum of theirs is exact, in whatever order."""
    generator = torch.Generator().manual_seed(0)
    expected = torch.randint(-4, 5, (rows, channels), generator=generator).double()
    return expected + torch.randint(-1, 2, (rows, channels), generator=generator), expected


def assert_sums_of_the_whole(sums: BlockSums, actual: Tensor, expected: Tensor) -> None:
    d, e = actual - expected, expected
    rows = [(e * e).sum(1), (d * d).sum(1), (d * e).sum(1), (d * e).square().sum(1)]
    assert torch.equal(sums.rows, torch.stack(rows))
    columns = [d.sum(0), (d * e).sum(0), (e * e).sum(0), (d * d).sum(0), e.sum(0)]
    assert torch.equal(sums.channels, torch.stack(columns))


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (3, 70), (64, 8), (65, 8)])
@pytest.mark.parametrize("elements", [1, 8, 64])
def test_sums_do_not_depend_on_blocks(
    shape: tuple[int, int], elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", elements * 8)
    actual, expected = pair(*shape)

    assert_sums_of_the_whole(sum_pair(actual, expected), actual, expected)
    assert count_misrounded(actual, expected) == int((actual != expected).sum())


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("rows", [5, 64, 65])
def test_sums_do_not_depend_on_threads(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "SPAN_ELEMENTS", 8 * 8)
    actual, expected = pair(rows, 8)
    actual[-1, 3] = expected[-1, 3] + 9.0

    sums = sum_pair(actual, expected)

    assert_sums_of_the_whole(sums, actual, expected)
    assert sums.worst.difference == 9.0
    assert sums.worst.index == (rows - 1, 3)
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_sums_are_bitwise_equal_for_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "SPAN_ELEMENTS", 16 * 8)
    expected = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))
    actual = expected.bfloat16()

    shared = sum_pair(actual, expected)
    torch.set_num_threads(1)
    alone = sum_pair(actual, expected)

    assert torch.equal(shared.channels, alone.channels)
    assert torch.equal(shared.rows, alone.rows)


@pytest.mark.usefixtures("two_threads")
def test_values_that_are_not_finite_are_counted_by_all_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blocks, "SPAN_ELEMENTS", 4 * 8)
    actual, expected = pair(16, 8)
    actual[1, 0] = torch.nan
    actual[9, 2] = -torch.inf
    actual[15, 7] = torch.nan

    sums = sum_pair(actual, expected)

    assert (sums.num_nan, sums.num_inf) == (2, 1)
    assert sums.rows[1].isnan().nonzero()[:, 0].tolist() == [1, 9, 15]


def test_products_of_bfloat16_are_taken_in_float32() -> None:
    expected = torch.full((256, 256), 1.0 + 2.0**-9)
    sums = sum_pair(expected.bfloat16(), expected)

    # d = -2**-9 everywhere; exact in float32.
    assert sums.rows[1].tolist() == [256 * 2.0**-18] * 256
    assert sums.rows[3].tolist() == pytest.approx(
        [256 * 2.0**-18 * (1 + 2.0**-9) ** 2] * 256, rel=1e-5
    )
