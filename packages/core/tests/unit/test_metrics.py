import copy
import math
import time

import pytest
import torch

from assay.errors import UsageError
from assay.metrics import CHUNK_ELEMENTS, NormSums, PairSums, RowErrors, ShapeMismatchError
from packages.core.tests.unit.pair_sums import matrix, sums_of

# Sums, worked out by hand: d = [[0, 1], [-1, 0]], e = [[1, 2], [3, 4]].
EXPECTED = matrix([1, 2], [3, 4])
ACTUAL = matrix([1, 3], [2, 4])


def test_sums_equal_those_computed_by_hand() -> None:
    sums = sums_of(ACTUAL, EXPECTED)

    assert (sums.num_calls, sums.num_elements) == (1, 4)
    assert sums.dd == 2.0  # 1 + 1
    assert sums.ee == 30.0  # 1 + 4 + 9 + 16
    assert sums.de == -1.0  # 1 * 2 - 1 * 3
    assert sums.dede == 13.0  # 2**2 + 3**2
    assert sums.relative_error == math.sqrt(2 / 30)
    assert sums.slope == -1 / 30
    assert sums.slope_standard_error == math.sqrt(13) / 30
    # Channels have d e of -3 and 2, and e e of 10 and 20.
    residuals = -3 + 10 / 30, 2 + 20 / 30
    assert sums.slope_standard_error_by_channel == pytest.approx(math.hypot(*residuals) / 30)


def test_standard_error_by_channel_needs_calls_of_one_width() -> None:
    sums = sums_of(ACTUAL, EXPECTED)
    sums.add(matrix([1.0]), matrix([2.0]), torch.zeros(1, dtype=torch.long), torch.zeros(1))

    assert sums.slope_standard_error_by_channel == 0.0


def test_channel_sums_equal_those_computed_by_hand() -> None:
    sums = sums_of(ACTUAL, EXPECTED)

    assert sums.channel is not None
    # Rows: d, d e, e e, d d, e; channel 0 has d (0, -1) and e (1, 3), channel 1 d (1, 0), e (2, 4).
    assert sums.channel.tolist() == [[-1, 1], [-3, 2], [10, 20], [1, 1], [4, 6]]
    assert sums.channel_rows == 2


def test_worst_element_gives_both_values_and_its_place() -> None:
    sums = sums_of(matrix([1, 2], [3, -5]), EXPECTED)

    assert sums.worst.difference == 9.0
    assert (sums.worst.actual, sums.worst.expected) == (-5.0, 4.0)
    assert sums.worst.index == (0, 1, 1)


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


# Shapes


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_empty_call_counts_as_a_call_without_elements(shape: tuple[int, int]) -> None:
    sums = sums_of(torch.zeros(shape), torch.zeros(shape))

    assert (sums.num_calls, sums.num_elements) == (1, 0)
    assert (sums.relative_error, sums.misrounded_share) == (0.0, 0.0)
    assert sums.worst_row() == (0.0, -1, -1)
    assert sums.bin_bias() == (0.0, 0.0)
    assert not sums.has_channel_statistics


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


def test_collected_calls_equal_calls_added_at_once() -> None:
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


def test_a_call_costs_no_more_if_many_wait() -> None:
    values, address = torch.ones(4, 1), torch.zeros(4, dtype=torch.long)
    sums, seconds = PairSums(), []
    for _ in range(16):
        started = time.thread_time()
        for _ in range(1000):  # as long as all fit into one chunk
            sums.add_later(values, values, address, address)
        seconds.append(time.thread_time() - started)

    assert sums.num_calls == 0
    assert min(seconds[8:]) < 4 * min(seconds[:4])


def test_a_copy_of_what_waits_goes_on_by_itself() -> None:
    address = torch.tensor([0])
    kept = PairSums()
    kept.add_later(matrix([4, 4]), matrix([0.1, 0.1]), address, address)
    copied = copy.deepcopy(kept)
    for sums in (kept, copied):
        sums.add_later(matrix([2, 2]), matrix([1, 1]), address, address)
        sums.flush()

    # One call of both rows has one scale.
    assert copied.num_calls == kept.num_calls == 2
    assert copied.worst_row() == kept.worst_row()
    (rows,) = copied.rows
    assert rows.scale.tolist() == pytest.approx([math.sqrt((0.02 + 2) / 2)] * 2)


def test_collected_calls_of_different_widths_are_not_mixed() -> None:
    address = torch.tensor([0])
    sums = PairSums()
    sums.add_later(matrix([2, 2]), matrix([1, 1]), address, address)
    sums.add_later(matrix([2, 2, 2]), matrix([1, 1, 1]), address, address)
    sums.flush()

    assert (sums.num_calls, sums.num_elements, sums.dd) == (2, 5, 5.0)
    assert not sums.has_channel_statistics


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_sums_do_not_depend_on_chunks(rows: int) -> None:
    width = CHUNK_ELEMENTS // 2 + 1  # one row a chunk, and an odd width
    expected = torch.ones(rows, width, dtype=torch.float64)
    actual = expected.clone()
    actual[-1, -1] = 4.0

    sums = sums_of(actual, expected)

    assert (sums.ee, sums.dd, sums.de) == (rows * width, 9.0, 3.0)
    assert sums.worst.index == (0, rows - 1, width - 1)
    assert sums.channel is not None
    assert sums.channel[3].tolist() == [0.0] * (width - 1) + [9.0]
    assert sums.worst_row()[2] == rows - 1


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_differences_are_taken_in_float64(dtype: torch.dtype) -> None:
    expected = torch.full((1, 2), 1.0 + 2.0**-40, dtype=torch.float64)

    assert sums_of(torch.ones(1, 2).to(dtype), expected).dd == 2 * 2.0**-80


@pytest.mark.parametrize("value", [1.0, math.nan])
def test_norms_alone_are_those_of_all_sums(value: float) -> None:
    expected = torch.randn(50, 30, generator=torch.Generator().manual_seed(0))
    actual = expected.bfloat16()
    actual[3, 5] = value
    address = torch.arange(50)
    norms, sums = NormSums(), PairSums()
    for one in (norms, sums):
        one.add_later(actual, expected, address, address)
        one.flush()

    assert (norms.dd, norms.ee, norms.worst) == (sums.dd, sums.ee, sums.worst)
    assert (norms.num_nan, norms.num_elements) == (sums.num_nan, sums.num_elements)
    assert torch.equal(norms.rows[0].error.nan_to_num(-1), sums.rows[0].error.nan_to_num(-1))
    assert norms.channel is None
    assert not bool(norms.bins.any())
    assert norms.num_row_slopes == 0


def test_rounding_of_float32_itself_is_resolved() -> None:
    expected = torch.tensor([[1.0 + 2.0**-26, 1.0]], dtype=torch.float64)

    sums = sums_of(expected.float(), expected)

    assert sums.relative_error == pytest.approx(2.0**-26 / math.sqrt(2), rel=1e-6)
