import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from assay.judge.limits import load_limits
from assay.metrics import PairSums
from assay.noise import (
    NO_NOISE,
    RATIOS,
    SHARE_FLOOR,
    DeviceShare,
    bins_ratio,
    channel_ratio,
    error_beyond,
    error_ratios,
    row_ratio,
    row_slope_ratio,
    share_ratio,
    slope_ratio,
    tensor_ratio,
)
from assay.statistics import GENERAL, SYSTEMATIC
from assay.verdicts import Ratio

UNIT = 2.0**-8  # of bfloat16

Judge = Callable[[PairSums, PairSums, float], Ratio | None]
every_ratio = pytest.mark.parametrize("judge", RATIOS)


def judged(judge: Judge, actual: PairSums, noise: PairSums, unit_roundoff: float) -> Ratio:
    ratio = judge(actual, noise, unit_roundoff)
    assert ratio is not None
    return ratio


def sums_of(error: Tensor, expected: Tensor) -> PairSums:
    address = torch.arange(len(expected))
    sums = PairSums()
    sums.add(expected + error, expected, torch.zeros_like(address), address)
    return sums


def ones(rows: int = 64, columns: int = 16) -> Tensor:
    return torch.ones(rows, columns, dtype=torch.float64)


def alternating(size: float, rows: int = 64, columns: int = 16) -> Tensor:
    """Errors of one size whose mean is zero in every channel."""
    return size * torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(rows // 2)[:, None].expand(
        rows, columns
    )


def _is_general(judge: Judge) -> bool:
    sums = sums_of(alternating(0.1), ones())
    return judged(judge, sums, sums, UNIT).statistic in GENERAL


of_any_error = pytest.mark.parametrize("judge", [one for one in RATIOS if _is_general(one)])


@pytest.mark.parametrize(
    ("actual", "expected", "value"),
    [
        (0.6, 0.2, 3.0),
        (0.0, 0.2, 0.0),
        (0.0, 0.0, 0.0),
        (0.1, 0.0, math.inf),
        (math.inf, 0.2, math.inf),
        (math.nan, 0.2, math.inf),
        (math.nan, math.nan, math.inf),
        (math.inf, math.inf, math.inf),
        (0.1, math.nan, math.inf),
    ],
)
def test_ratio_of_what_is_no_number_is_infinite(
    actual: float, expected: float, value: float
) -> None:
    assert Ratio("replay-tensor", actual, expected).value == pytest.approx(value)


def test_swapped_errors_give_the_inverse_ratio() -> None:
    assert Ratio("replay-tensor", 0.5, 0.25).value == 2.0
    assert Ratio("replay-tensor", 0.25, 0.5).value == 0.5


@of_any_error
def test_error_is_judged_by_the_noise_of_the_same_place(judge: Judge) -> None:
    actual, noise = sums_of(alternating(0.3), ones()), sums_of(alternating(0.1), ones())

    ratio = judged(judge, actual, noise, UNIT)

    assert ratio.actual == pytest.approx(0.3)
    assert ratio.expected == pytest.approx(0.1)


@of_any_error
def test_lucky_noise_counts_as_half_a_unit(judge: Judge) -> None:
    actual, lucky = sums_of(alternating(0.01), ones()), sums_of(alternating(0.0), ones())

    assert judged(judge, actual, lucky, UNIT).expected == UNIT / 2
    assert judged(judge, actual, NO_NOISE, UNIT).expected == UNIT / 2


@of_any_error
def test_noise_run_that_overflows_fails_no_healthy_candidate(judge: Judge) -> None:
    overflown = sums_of(alternating(0.1).index_fill(0, torch.tensor([3]), torch.inf), ones())

    ratio = judged(judge, sums_of(alternating(0.01), ones()), overflown, UNIT)

    assert ratio.expected == UNIT / 2
    assert math.isfinite(ratio.value)


def test_scale_that_is_wrong_for_each_row_in_another_way_exceeds_the_noise() -> None:
    expected = ones(columns=64) * (1 + 1e-6 * torch.arange(64, dtype=torch.float64)[:, None])
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(32)
    rounding = 0.01 * signs[None, :].expand(64, 64)
    noise = sums_of(rounding, expected)

    assert judged(row_slope_ratio, noise, noise, UNIT).value < 1
    ratio = judged(
        row_slope_ratio, sums_of(rounding + alternating(0.02, columns=64), expected), noise, UNIT
    )

    assert ratio.actual == pytest.approx(0.02, rel=1e-4)
    # Chance: errors of sqrt(0.01**2 + 0.02**2) over the root of 64 elements.
    assert ratio.value == pytest.approx(0.02 * 8 / math.hypot(0.01, 0.02), rel=1e-4)


def test_short_rows_are_not_judged_one_by_one() -> None:
    faulty = alternating(0.01, columns=8).clone()
    faulty[3] = 0.5

    short = sums_of(faulty, ones(columns=8))

    assert row_ratio(short, short, UNIT) is None


def test_fault_in_few_rows_shows_in_the_worst_row_alone() -> None:
    error = alternating(0.01, rows=1000)
    faulty = error.clone()
    faulty[500] = 0.1
    actual, noise = sums_of(faulty, ones(1000)), sums_of(error, ones(1000))

    assert tensor_ratio(actual, noise, UNIT).value < 1.1
    assert judged(row_ratio, actual, noise, UNIT).value == pytest.approx(10.0)


def test_scale_far_below_the_noise_shows_in_the_slope_alone() -> None:
    # Noise of 1 %, a scale of 0.1 %.
    noise_error = alternating(0.01, rows=4096)
    actual = sums_of(noise_error + 0.001 * ones(4096), ones(4096))
    noise = sums_of(noise_error, ones(4096))

    assert tensor_ratio(actual, noise, UNIT).value < 1.01
    ratio = slope_ratio(actual, noise, UNIT)
    assert ratio.actual == pytest.approx(0.001)
    # Three standard errors of 0.01 / sqrt(4096 * 16), which is more than u / 1000.
    assert ratio.expected == pytest.approx(3 * 0.01 / 256, rel=0.01)
    assert ratio.value > 4


def test_slope_within_chance_is_no_slope() -> None:
    # One of 64 errors has the other sign: a slope of 2 / 64 of the error, 2 / 8 standard errors.
    error = alternating(0.01, columns=1).clone()
    error[1] = 0.01

    ratio = slope_ratio(sums_of(error, ones(columns=1)), NO_NOISE, UNIT)

    assert ratio.value == pytest.approx(0.25 / 3)


def test_equal_rows_do_not_make_a_slope_more_certain() -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = (0.01 * torch.randn(1, 64, generator=generator).double() for _ in range(2))
    rows = ones(4096, columns=64)
    noise = sums_of((one - one.mean()) * rows, rows)

    # The slope of 64 errors, in three of their standard errors.
    assert slope_ratio(sums_of(other * rows, rows), noise, UNIT).value < 1
    # A scale of the candidate makes its own errors alike, and is seen.
    assert slope_ratio(sums_of((other + 0.1) * rows, rows), noise, UNIT).value > 10


def test_slope_of_the_noise_run_does_not_count_against_the_candidate() -> None:
    biased = sums_of(0.01 * ones(4096), ones(4096))

    assert slope_ratio(biased, biased, UNIT).value == pytest.approx(1.0)


def test_slope_that_the_device_has_everywhere_is_taken_off() -> None:
    biased = sums_of(-0.002 * ones(4096), ones(4096))
    exact = sums_of(0.0 * ones(4096), ones(4096))

    assert slope_ratio(biased, exact, UNIT, DeviceShare(-0.002)).actual == pytest.approx(
        0.0, abs=1e-12
    )
    assert slope_ratio(biased, exact, UNIT).actual == pytest.approx(0.002)


def test_error_of_another_shape_shows_in_the_bins() -> None:
    different = 1 + 1e-6 * torch.arange(512, dtype=torch.float64)[:, None]
    expected = torch.tensor([-3.0, -1.0, 1.0, 3.0], dtype=torch.float64) * different
    even = 0.001 * torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
    noise = alternating(0.01, 512, columns=4)

    actual, reference = sums_of(noise + even, expected), sums_of(noise, expected)

    assert slope_ratio(actual, reference, UNIT).value < 0.01
    ratio = judged(bins_ratio, actual, reference, UNIT)
    assert ratio.actual == pytest.approx(0.001 / math.sqrt(5), rel=1e-3)
    # Chance: 0.01 over the root of 512 values a bin.
    assert ratio.expected == pytest.approx(0.01 / math.sqrt(5) / math.sqrt(512), rel=0.01)


def test_repeated_rows_do_not_make_the_mean_of_a_bin_more_certain() -> None:
    # As in the first layer, which computes the same for each repeated token.
    seeded = torch.Generator().manual_seed(1)
    expected, error = torch.randn(2, 16, 64, generator=seeded, dtype=torch.float64)
    repeated = sums_of(1e-3 * error.repeat(64, 1), expected.repeat(64, 1))
    bias, chance = repeated.bin_bias()

    ratio = judged(bins_ratio, repeated, sums_of(0 * expected, expected), UNIT)

    assert repeated.repetition == 64
    assert bias > 4 * chance
    assert ratio.value < 2


@pytest.mark.parametrize("num_copies", [1, 40])
def test_slope_of_a_single_row_may_be_large_by_chance(num_copies: int) -> None:
    # As a prompt that repeats one token. One slope is over 2.3 standard errors in 2% of cases.
    seeded = torch.Generator().manual_seed(1)
    ratios = []
    for _ in range(400):
        actual, noise = (
            sums_of(1e-3 * error.repeat(num_copies, 1), expected.repeat(num_copies, 1))
            for error, expected in torch.randn(2, 2, 1, 64, generator=seeded, dtype=torch.float64)
        )
        ratios.append(judged(row_slope_ratio, actual, noise, UNIT).value)

    assert 1.4 < max(ratios) < 2.3


def test_bins_have_a_floor_where_nothing_rounds() -> None:
    ratio = judged(bins_ratio, sums_of(0 * ones(), ones()), sums_of(0 * ones(), ones()), UNIT)

    assert (ratio.actual, ratio.expected) == (0.0, UNIT / 200)


def test_bias_of_one_channel_shows_in_the_channels_alone() -> None:
    rows, columns = 1024, 256
    noise_error = alternating(0.01, rows, columns)
    faulty = noise_error.clone()
    faulty[:, 7] += 0.005
    actual, noise = sums_of(faulty, ones(rows, columns)), sums_of(noise_error, ones(rows, columns))

    assert tensor_ratio(actual, noise, UNIT).value < 1.01
    assert slope_ratio(actual, noise, UNIT).value < 1.0
    ratio = judged(channel_ratio, actual, noise, UNIT)
    # A mean error of 0.005 is 16 standard errors of 0.01 / sqrt(1024); chance gives sqrt(2 ln 512).
    assert ratio.value == pytest.approx(16 / math.sqrt(2 * math.log(512)), rel=0.01)
    assert ratio.actual == pytest.approx(0.005, rel=0.01)


def test_channels_with_few_rows_are_not_judged() -> None:
    short = sums_of(ones(16), ones(16))

    assert channel_ratio(short, short, UNIT) is None


def test_channel_without_noise_of_its_own_has_that_of_rounding() -> None:
    rows = 1024
    faulty = torch.zeros(rows, 4, dtype=torch.float64)
    faulty[:, 2] = UNIT / 2
    exact = sums_of(0 * faulty, ones(rows, 4))

    # The error is half a unit: 32 standard errors of the mean of 1024 roundings.
    value = judged(channel_ratio, sums_of(faulty, ones(rows, 4)), exact, UNIT).value
    assert value == pytest.approx(32 / math.sqrt(2 * math.log(8)), rel=1e-6)


def tail(*values: float, repeated: int = 28) -> Tensor:
    """The result of an activation: values near zero, and some in its tail that are equal."""
    generator = torch.Generator().manual_seed(0)
    usual = torch.randn(4096, generator=generator, dtype=torch.float64)
    equal = torch.tensor(values, dtype=torch.float64).repeat(repeated)
    return torch.cat([usual, equal])[:, None]


def rounded(expected: Tensor, factor: float, *, pointwise: bool = True) -> PairSums:
    address = torch.arange(len(expected))
    sums = PairSums(pointwise=pointwise)
    sums.add((expected * factor).bfloat16(), expected, address, address)
    return sums


def test_correctly_rounded_equal_values_are_no_bias() -> None:
    noise = rounded(tail(), 1.0)

    other = judged(bins_ratio, rounded(tail(9.03), 1.0, pointwise=False), noise, UNIT)
    ratio = judged(bins_ratio, rounded(tail(9.03), 1.0), noise, UNIT)

    assert other.value > 7.1
    assert (ratio.value, ratio.expected) == (0.0, other.expected)


def test_bias_of_an_pointwise_stage_is_found_as_in_others() -> None:
    noise = rounded(tail(), 1.0)

    found = judged(bins_ratio, rounded(tail(), 1.01), noise, UNIT).value
    other = judged(bins_ratio, rounded(tail(), 1.01, pointwise=False), noise, UNIT).value

    assert other / 1.5 < found <= other


def test_stages_of_which_one_adds_values_up_are_compared_with_rounding() -> None:
    noise = rounded(tail(), 1.0, pointwise=False)

    assert judged(bins_ratio, rounded(tail(9.03), 1.0), noise, UNIT).value > 7.1


def test_share_of_wrongly_rounded_elements_has_a_floor() -> None:
    expected = torch.ones(100, 4)
    wrong = expected.bfloat16().clone()
    wrong[:10] = 1.0078125  # the next number
    address = torch.arange(100)
    actual, exact = PairSums(pointwise=True), PairSums(pointwise=True)
    actual.add(wrong, expected, address, address)
    exact.add(expected.bfloat16(), expected, address, address)

    ratio = share_ratio(actual, exact)

    assert (ratio.actual, ratio.expected) == (0.1, SHARE_FLOOR)
    assert share_ratio(actual, NO_NOISE) == ratio


@every_ratio
def test_nothing_compared_is_no_error(judge: Judge) -> None:
    for noise in (PairSums(), NO_NOISE):
        ratio = judge(PairSums(), noise, UNIT)
        assert ratio is None or ratio.value == 0.0


@of_any_error
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_value_that_is_not_finite_is_over_every_limit(judge: Judge, value: float) -> None:
    error = alternating(0.01).clone()
    error[3, 1] = value
    noise = sums_of(alternating(0.01), ones())

    assert judged(judge, sums_of(error, ones()), noise, UNIT).value == math.inf


@every_ratio
def test_same_sums_on_both_sides_have_a_ratio_of_at_most_one(judge: Judge) -> None:
    generator = torch.Generator().manual_seed(0)
    expected = torch.randn(256, 16, generator=generator)
    sums = sums_of(expected.bfloat16().float() - expected, expected)

    assert 0 < judged(judge, sums, sums, UNIT).value <= 1.0


def _ratios(error: Tensor, expected: Tensor, noise: Tensor | None = None) -> dict[str, float]:
    """Return the ratios of float32 values whose error has these unit roundoffs of the value."""
    address = torch.zeros(len(expected), dtype=torch.long)
    sums, of_noise = PairSums(), PairSums()
    sums.add(expected * (1 + error * 2.0**-24), expected, address, address)
    if noise is not None:
        of_noise.add(expected * (1 + noise * 2.0**-24), expected, address, address)
    found = error_ratios(sums, of_noise if noise is not None else NO_NOISE, 2.0**-24)
    return {one.statistic: one.value for one in found}


@pytest.mark.parametrize("tails", [0.0, 0.5])
def test_bias_of_float32_functions_is_no_fault_and_a_larger_one_is(tails: float) -> None:
    generator = torch.Generator().manual_seed(0)
    expected = torch.randn(400, 64, generator=generator).double()
    expected *= torch.exp(tails * torch.randn(400, 64, generator=generator).double())

    of_a_gpu = _ratios(torch.full_like(expected, 3.0), expected)
    of_a_fault = _ratios(torch.full_like(expected, 400.0), expected)

    limits = load_limits("noise")
    for statistic in SYSTEMATIC.intersection(of_a_gpu):
        assert 0 < of_a_gpu[statistic] < limits.of(statistic)
        assert of_a_fault[statistic] > limits.of(statistic)


def test_bias_of_float32_functions_is_no_fault_beside_channels_with_much_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    expected = torch.ones(400, 64).double()
    # As in rotary embeddings, where the rounding of the phase grows with the frequency.
    noise = torch.zeros_like(expected)
    noise[:, :32] = 60 * torch.randn(400, 32, generator=generator).double()

    def ratio(bias: float) -> float:
        error = noise.clone()
        error[:, 32:] = bias
        return _ratios(error, expected, noise)["replay-channel"]

    limit = load_limits("noise").of("replay-channel")
    assert 0 < ratio(3.0) < limit < ratio(40.0)


@pytest.mark.parametrize(
    ("factor", "error"), [(1.0, 0.5), (1.5, 0.0), (3.0, 0.5), (0.75, 1.0), (0.0, math.inf)]
)
def test_error_beyond_a_factor_is_relative_to_the_scaled_values(
    factor: float, error: float
) -> None:
    sums = PairSums()
    expected, rows = torch.ones(2, 4), torch.arange(2)
    sums.add(1.5 * expected, expected, rows, rows)

    assert error_beyond(sums, factor) == pytest.approx(error)


def test_a_ratio_without_a_limit_is_not_within_it() -> None:
    with pytest.raises(ValueError, match="replay-tensor has no limit"):
        assert not Ratio("replay-tensor", 9.0, 1.0).failed
    assert Ratio("replay-tensor", 9.0, 1.0).judged(3.0).failed
