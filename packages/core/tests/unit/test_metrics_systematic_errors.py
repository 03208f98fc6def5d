"""What all elements, a part of them or a channel have in common: slopes, bins, biases."""

import math

import pytest
import torch

from assay.kernel.sums import BIN_EDGES, BINNED_ELEMENTS, NUM_BINS
from packages.core.tests.unit.pair_sums import sums_of


@pytest.mark.parametrize("scale", [2.0**-12, -(2.0**-10), 0.5])
def test_slope_is_the_error_of_a_scale(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    expected = torch.randn(64, 32, generator=generator, dtype=torch.float64)

    sums = sums_of(expected + scale * expected, expected)

    assert sums.slope == pytest.approx(scale, rel=1e-9)


def test_slope_of_rounding_is_chance_far_below_the_error() -> None:
    generator = torch.Generator().manual_seed(0)
    expected = torch.randn(2048, 32, generator=generator)

    sums = sums_of(expected.bfloat16(), expected)

    # Uniform rounding errors: rms of about 0.4 u at random significands; their slope is noise.
    assert 0.2 * 2.0**-8 < sums.relative_error < 2.0**-8
    assert abs(sums.slope) < 4 * sums.slope_standard_error
    assert sums.slope_standard_error < 2.0**-8 / 100


def test_bin_edges_are_the_quantiles_of_a_normal_distribution_and_tails() -> None:
    assert len(BIN_EDGES) == 23 + 2 * 4 == NUM_BINS - 1
    assert list(BIN_EDGES) == sorted(BIN_EDGES)
    assert [-edge for edge in reversed(BIN_EDGES)] == pytest.approx(list(BIN_EDGES), abs=1e-12)
    # The quartiles of the normal distribution (tables: 0.6745), to the nearest 1/64.
    assert BIN_EDGES[4 + 5] == -43 / 64


def test_bins_detect_an_even_error_that_has_no_slope() -> None:
    expected = torch.tensor([-3.0, -1.0, 1.0, 3.0], dtype=torch.float64).repeat(32, 1)
    error = torch.tensor([0.01, -0.01, -0.01, 0.01], dtype=torch.float64)

    sums = sums_of(expected + error, expected)

    # rms of e is sqrt(5); four bins, each with a mean error of 0.01 in size and no variance.
    bias, chance = sums.bin_bias()
    assert sums.slope == pytest.approx(0.0, abs=1e-12)
    assert bias == pytest.approx(0.01 / math.sqrt(5))
    assert chance == pytest.approx(0.0, abs=1e-9)


def test_bins_with_few_elements_are_not_used() -> None:
    expected = torch.ones(1, 17, dtype=torch.float64)
    actual = expected + 0.5
    expected[0, :2] = -30.0  # a tail with two elements

    sums = sums_of(actual, expected)

    used = sums.bins[0][sums.bins[0] >= 16]
    assert used.numel() == 0  # 15 remain in the other bin
    assert sums.bin_bias() == (0.0, 0.0)


@pytest.mark.parametrize(("factor", "bias"), [(1.0, 0.0), (1 + 2.0**-7, 2.0**-7)])
def test_bias_beyond_rounding_leaves_correct_rounding_out(factor: float, bias: float) -> None:
    expected = torch.full((2, 16), 1.003, dtype=torch.float64)
    actual = expected.bfloat16() * factor

    sums = sums_of(actual, expected, pointwise=True)

    found = sums.bin_bias_beyond_rounding()
    assert found is not None
    assert found == pytest.approx((bias / 1.003, 0.0), abs=1e-9)
    assert sums.bin_bias()[0] == pytest.approx(abs(float(actual[0, 0]) - 1.003) / 1.003, rel=1e-4)
    assert sums_of(actual, expected).bin_bias_beyond_rounding() is None


def test_chance_of_bins_falls_with_the_root_of_the_count() -> None:
    expected = torch.ones(1, 1024, dtype=torch.float64)
    error = torch.tensor([0.1, -0.1], dtype=torch.float64).repeat(512)

    bias, chance = sums_of(expected + error, expected).bin_bias()

    assert bias == pytest.approx(0.0, abs=1e-12)
    assert chance == pytest.approx(0.1 / math.sqrt(1024))


def test_rows_of_different_scales_are_detected_where_their_mean_is_none() -> None:
    expected = torch.ones(64, 16, dtype=torch.float64)
    factors = torch.tensor([0.02, -0.02], dtype=torch.float64).repeat(32)[:, None]

    sums = sums_of(expected * (1 + factors), expected)

    slope, chance = sums.row_slope()
    assert sums.slope == pytest.approx(0.0, abs=1e-12)
    assert slope == pytest.approx(0.02)
    # Sixteen equal errors of 0.02: their sum over 16, were their signs independent.
    assert chance == pytest.approx(0.02 / math.sqrt(16))
    assert sums.row_slope(0.01)[0] == pytest.approx(math.sqrt((0.01**2 + 0.03**2) / 2))


def test_errors_that_are_independent_give_rows_the_slope_of_chance() -> None:
    generator = torch.Generator().manual_seed(0)
    expected = torch.randn(512, 128, generator=generator, dtype=torch.float64)
    error = 0.01 * torch.randn(512, 128, generator=generator, dtype=torch.float64)

    slope, chance = sums_of(expected + error, expected).row_slope()

    assert slope == pytest.approx(chance, rel=0.15)


@pytest.mark.parametrize("columns", [1, 15])
def test_short_rows_have_no_slope(columns: int) -> None:
    expected = torch.ones(64, columns, dtype=torch.float64)

    assert sums_of(1.5 * expected, expected).row_slope() == (0.0, 0.0)


def test_rows_of_nearly_nothing_have_no_slope() -> None:
    expected = torch.ones(3, 16, dtype=torch.float64)
    expected[1] = 1e-3
    actual = expected.clone()
    actual[1] *= 1.5

    assert sums_of(actual, expected).row_slope()[0] == 0.0


def test_sampled_bins_include_every_channel() -> None:
    # Twice as many elements as are binned: an even stride would skip every other channel.
    expected = torch.ones(2 * BINNED_ELEMENTS // 64, 64, dtype=torch.float64)
    expected[:, 1] = -1.0

    sums = sums_of(expected, expected)

    negative = torch.tensor(BIN_EDGES).lt(0).sum()
    assert float(sums.bins[0][: int(negative)].sum()) > 0
    assert float(sums.bins[0].sum()) <= BINNED_ELEMENTS


def test_channel_sums_show_the_one_channel_with_a_bias() -> None:
    rows = 64
    expected = torch.ones(rows, 3, dtype=torch.float64)
    noise = torch.tensor([0.1, -0.1], dtype=torch.float64).repeat(rows // 2)
    actual = expected.clone()
    actual[:, 0] += noise
    actual[:, 1] += 0.1

    channel = sums_of(actual, expected).channel

    # An alternating error has no sum; e is 1 everywhere, so the sums of d and of d e are the same.
    assert channel is not None
    for of_channels, by_hand in zip(
        channel, ([0, 6.4, 0], [0, 6.4, 0], [64] * 3, [0.64, 0.64, 0], [64] * 3), strict=True
    ):
        assert of_channels.tolist() == pytest.approx(by_hand, abs=1e-9)


def test_too_few_rows_give_no_channel_statistics() -> None:
    assert not sums_of(torch.ones(31, 2), torch.ones(31, 2)).has_channel_statistics
    assert sums_of(torch.ones(32, 2), torch.ones(32, 2)).has_channel_statistics


def test_misrounded_share_counts_what_is_not_the_rounded_value() -> None:
    expected = torch.tensor([[1.0, 1.0 + 2.0**-10, 3.0, 5.0]])
    actual = expected.bfloat16()
    actual[0, 3] = 5.03125  # one unit in the last place off

    sums = sums_of(actual, expected, pointwise=True)

    assert sums.num_misrounded == 1
    assert sums.misrounded_share == 0.25
