import math

import pytest
import torch
from torch import Tensor

from assay.blocks import compute_dtype
from assay.errors import UsageError
from assay.metrics import (
    BIN_EDGES,
    BINNED_ELEMENTS,
    CHUNK_ELEMENTS,
    NUM_BINS,
    PairSums,
    RowErrors,
    ShapeMismatchError,
)


def sums_of(
    actual: Tensor, expected: Tensor, prompts: list[int] | None = None, start: int = 0
) -> PairSums:
    rows = len(actual)
    prompt = torch.tensor(prompts) if prompts is not None else torch.zeros(rows, dtype=torch.long)
    sums = PairSums()
    sums.add(actual, expected, prompt, torch.arange(start, start + rows))
    return sums


def matrix(*rows: list[float], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(rows, dtype=dtype)


# Sums, worked out by hand: d = [[0, 1], [-1, 0]], e = [[1, 2], [3, 4]].
EXPECTED = matrix([1, 2], [3, 4])
ACTUAL = matrix([1, 3], [2, 4])


def test_sums_are_those_worked_out_by_hand() -> None:
    sums = sums_of(ACTUAL, EXPECTED)

    assert (sums.num_calls, sums.num_elements) == (1, 4)
    assert sums.dd == 2.0  # 1 + 1
    assert sums.ee == 30.0  # 1 + 4 + 9 + 16
    assert sums.de == -1.0  # 1 * 2 - 1 * 3
    assert sums.dede == 13.0  # 2**2 + 3**2
    assert sums.relative_error == math.sqrt(2 / 30)
    assert sums.slope == -1 / 30
    assert sums.slope_standard_error == math.sqrt(13) / 30


def test_channel_sums_are_those_worked_out_by_hand() -> None:
    sums = sums_of(ACTUAL, EXPECTED)

    assert sums.channel is not None
    # Rows: d, d e, e e, d d, e; channel 0 has d (0, -1) and e (1, 3), channel 1 d (1, 0), e (2, 4).
    assert sums.channel.tolist() == [[-1, 1], [-3, 2], [10, 20], [1, 1], [4, 6]]
    assert sums.channel_rows == 2


def test_worst_element_gives_both_values_and_its_place() -> None:
    sums = sums_of(matrix([1, 2], [3, -5]), EXPECTED)

    assert sums.worst.difference == 9.0
    assert (sums.worst.actual, sums.worst.expected) == (-5.0, 4.0)
    assert sums.worst.index == (1, 1)


def test_identical_tensors_have_no_error_of_any_kind() -> None:
    sums = sums_of(EXPECTED, EXPECTED)

    assert (sums.relative_error, sums.slope, sums.slope_standard_error) == (0.0, 0.0, 0.0)
    assert (sums.misrounded_share, sums.worst_row()[0], sums.worst.difference) == (0.0, 0.0, 0.0)
    assert sums.bin_bias() == (0.0, 0.0)


def test_swapped_arguments_give_another_number() -> None:
    one, two = torch.ones(2, 3), torch.full((2, 3), 2.0)

    assert sums_of(two, one).relative_error == 1.0
    assert sums_of(one, two).relative_error == 0.5
    assert sums_of(two, one).slope == 1.0
    assert sums_of(one, two).slope == -0.5


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

    sums = sums_of(actual, EXPECTED, prompts=[5, 6])

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
    expected = matrix([1, 2], [math.inf, 4], dtype=compute_dtype(dtype))
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
    stored = expected.to(compute_dtype(dtype))

    sums = sums_of(actual, stored)

    assert sums.relative_error == pytest.approx(0.5, rel=1e-6)
    assert sums.slope == pytest.approx(0.5, rel=1e-6)
    assert sums.slope_standard_error == pytest.approx(0.5 / math.sqrt(32), rel=1e-6)
    assert sums.worst_row()[0] == pytest.approx(0.5, rel=1e-6)
    assert sums.bin_bias()[0] == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lowest_numbers_of_a_mask_agree_and_hide_no_error(dtype: torch.dtype) -> None:
    stored = compute_dtype(dtype)
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


# Shapes


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_empty_call_counts_as_a_call_without_elements(shape: tuple[int, int]) -> None:
    sums = sums_of(torch.zeros(shape), torch.zeros(shape))

    assert (sums.num_calls, sums.num_elements) == (1, 0)
    assert (sums.relative_error, sums.misrounded_share) == (0.0, 0.0)
    assert sums.worst_row() == (0.0, -1, -1)
    assert sums.bin_bias() == (0.0, 0.0)
    assert sums.channel_scores().shape == (2, 0)


@pytest.mark.parametrize("method", ["add", "add_later"])
def test_other_shape_is_an_error_that_names_both(method: str) -> None:
    prompt = torch.zeros(2, dtype=torch.long)

    with pytest.raises(ShapeMismatchError) as error:
        getattr(PairSums(), method)(torch.zeros(2, 3), torch.zeros(2, 4), prompt, prompt)

    assert str(error.value) == "actual has shape (2, 3), expected (2, 4)"
    assert isinstance(error.value, UsageError)


def test_broadcastable_shapes_are_not_the_same_shape() -> None:
    with pytest.raises(ShapeMismatchError):
        sums_of(torch.zeros(2, 3), torch.zeros(1, 3))


# Pooling


def test_calls_are_pooled_and_not_averaged() -> None:
    prompt = torch.tensor([0])
    sums = PairSums()
    sums.add(matrix([2, 0]), matrix([1, 0]), prompt, prompt)  # dd 1, ee 1
    sums.add(matrix([0, 7]), matrix([0, 7]), prompt, prompt + 1)  # dd 0, ee 49

    assert sums.num_calls == 2
    assert sums.relative_error == math.sqrt(1 / 50)  # the mean of the two errors would be 0.5


def test_waiting_calls_are_those_added_at_once() -> None:
    generator = torch.Generator().manual_seed(0)
    calls = [
        (
            torch.randint(-4, 5, (rows, 6), generator=generator).double(),
            torch.randint(-4, 5, (rows, 6), generator=generator).double(),
        )
        for rows in (5, 1, 1, 1)
    ]
    later, at_once = PairSums(), PairSums()
    for number, (actual, expected) in enumerate(calls):
        address = torch.full((len(actual),), number)
        memory = [tensor.clone() for tensor in (actual, expected, address)]
        later.add_later(memory[0], memory[1], memory[2], memory[2])
        for tensor in memory:
            tensor.zero_()  # it is used again while the call waits
    later.flush()
    actual, expected = (torch.cat(parts) for parts in zip(*calls, strict=True))
    address = torch.tensor([0] * 5 + [1, 2, 3])
    at_once.add(actual, expected, address, address)

    assert (later.num_calls, later.num_elements) == (4, 48)
    assert (later.dd, later.ee, later.de) == (at_once.dd, at_once.ee, at_once.de)
    assert torch.equal(later.bins, at_once.bins)
    assert later.worst_row() == at_once.worst_row()


def test_waiting_calls_of_other_widths_are_not_mixed() -> None:
    address = torch.tensor([0])
    sums = PairSums()
    sums.add_later(matrix([2, 2]), matrix([1, 1]), address, address)
    sums.add_later(matrix([2, 2, 2]), matrix([1, 1, 1]), address, address)
    sums.flush()

    assert (sums.num_calls, sums.num_elements, sums.dd) == (2, 5, 5.0)
    assert sums.channel_scores().shape == (2, 0)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_chunks_do_not_show(rows: int) -> None:
    width = CHUNK_ELEMENTS // 2 + 1  # one row a chunk, and an odd width
    expected = torch.ones(rows, width, dtype=torch.float64)
    actual = expected.clone()
    actual[-1, -1] = 4.0

    sums = sums_of(actual, expected)

    assert (sums.ee, sums.dd, sums.de) == (rows * width, 9.0, 3.0)
    assert sums.worst.index == (rows - 1, width - 1)
    assert sums.channel is not None
    assert sums.channel[3].tolist() == [0.0] * (width - 1) + [9.0]
    assert sums.worst_row()[2] == rows - 1


# Systematic errors


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
    # The quartiles of the normal distribution (tables: 0.6745).
    assert BIN_EDGES[4 + 5] == pytest.approx(-0.67449, abs=1e-5)


def test_bins_see_an_even_error_that_has_no_slope() -> None:
    expected = torch.tensor([-3.0, -1.0, 1.0, 3.0], dtype=torch.float64).repeat(32, 1)
    error = torch.tensor([0.01, -0.01, -0.01, 0.01], dtype=torch.float64)

    sums = sums_of(expected + error, expected)

    # rms of e is sqrt(5); four bins, each with a mean error of 0.01 in size and no variance.
    bias, chance = sums.bin_bias()
    assert sums.slope == pytest.approx(0.0, abs=1e-12)
    assert bias == pytest.approx(0.01 / math.sqrt(5))
    assert chance == pytest.approx(0.0, abs=1e-9)


def test_bins_with_few_elements_say_nothing() -> None:
    expected = torch.ones(1, 17, dtype=torch.float64)
    actual = expected + 0.5
    expected[0, :2] = -30.0  # a tail with two elements

    sums = sums_of(actual, expected)

    used = sums.bins[0][sums.bins[0] >= 16]
    assert used.numel() == 0  # 15 remain in the other bin
    assert sums.bin_bias() == (0.0, 0.0)


def test_chance_of_bins_falls_with_the_root_of_the_count() -> None:
    expected = torch.ones(1, 1024, dtype=torch.float64)
    error = torch.tensor([0.1, -0.1], dtype=torch.float64).repeat(512)

    bias, chance = sums_of(expected + error, expected).bin_bias()

    assert bias == pytest.approx(0.0, abs=1e-12)
    assert chance == pytest.approx(0.1 / math.sqrt(1024))


def test_rows_of_another_scale_each_are_seen_where_their_mean_is_none() -> None:
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


def test_sampled_bins_see_every_channel() -> None:
    # Twice as many elements as are binned: an even stride would skip every other channel.
    expected = torch.ones(2 * BINNED_ELEMENTS // 64, 64, dtype=torch.float64)
    expected[:, 1] = -1.0

    sums = sums_of(expected, expected)

    negative = torch.tensor(BIN_EDGES).lt(0).sum()
    assert float(sums.bins[0][: int(negative)].sum()) > 0
    assert float(sums.bins[0].sum()) <= BINNED_ELEMENTS


def test_channel_scores_find_the_one_channel_with_a_bias() -> None:
    rows = 64
    expected = torch.ones(rows, 3, dtype=torch.float64)
    noise = torch.tensor([0.1, -0.1], dtype=torch.float64).repeat(rows // 2)
    actual = expected.clone()
    actual[:, 0] += noise
    actual[:, 1] += 0.1

    slope, bias = sums_of(actual, expected).channel_scores().tolist()

    # A constant error is sqrt(rows) standard errors away, an alternating one none; e is 1
    # everywhere, so slope and bias are the same.
    assert slope == pytest.approx([0.0, 8.0, 0.0], abs=1e-9)
    assert bias == pytest.approx([0.0, 8.0, 0.0], abs=1e-9)


def test_too_few_rows_give_no_channel_scores() -> None:
    assert sums_of(torch.ones(31, 2), torch.ones(31, 2)).channel_scores().shape == (2, 0)
    assert sums_of(torch.ones(32, 2), torch.ones(32, 2)).channel_scores().shape == (2, 2)


def test_misrounded_share_counts_what_is_not_the_rounded_value() -> None:
    expected = torch.tensor([[1.0, 1.0 + 2.0**-10, 3.0, 5.0]])
    actual = expected.bfloat16()
    actual[0, 3] = 5.03125  # one unit in the last place off

    sums = sums_of(actual, expected)

    assert sums.num_misrounded == 1
    assert sums.misrounded_share == 0.25


# Rows


def test_error_in_one_token_shows_in_its_row_and_not_in_the_tensor() -> None:
    expected = torch.ones(1000, 4, dtype=torch.float64)
    actual = expected.clone()
    actual[17] = 1.5

    sums = sums_of(actual, expected, start=100)

    assert sums.relative_error == pytest.approx(0.5 / math.sqrt(1000))
    assert sums.worst_row() == (0.5, 0, 117)


def test_nearly_zero_row_is_measured_against_a_tenth_of_the_usual_norm() -> None:
    # Norms 5 and 0: the root mean square is sqrt(12.5).
    sums = sums_of(matrix([3, 4.5], [0.1, 0]), matrix([3, 4], [0, 0]))

    error = RowErrors.concatenate(sums.rows).relative()

    assert error.tolist() == pytest.approx([0.5 / 5, 0.1 / (0.1 * math.sqrt(12.5))])


def test_no_rows_have_no_worst() -> None:
    assert PairSums().worst_row() == (0.0, -1, -1)
    assert RowErrors.concatenate([]).relative().numel() == 0


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float64),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float8_e4m3fn, torch.float32),
    ],
)
def test_differences_are_taken_in_a_wider_dtype(dtype: torch.dtype, expected: torch.dtype) -> None:
    assert compute_dtype(dtype) is expected


def test_rounding_of_float32_itself_is_resolved() -> None:
    expected = torch.tensor([[1.0 + 2.0**-26, 1.0]], dtype=torch.float64)

    sums = sums_of(expected.float(), expected)

    assert sums.relative_error == pytest.approx(2.0**-26 / math.sqrt(2), rel=1e-6)
