"""Roundings, against hand-computed values, exact fractions and `torch.finfo`."""

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from assay.devices.sim.arithmetic import round_to_scaled_e4m3, round_to_tf32, round_toward_zero
from assay.dtypes import float_format

INF, NAN = float("inf"), float("nan")


def tensor(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(
    ("dtype", "value", "expected"),
    [
        # bfloat16 has 8 significand bits: 2^-7 is one unit in the last place of 1.
        (torch.bfloat16, 1 + 2**-8 + 2**-9, 1.0),
        (torch.bfloat16, 1 + 2**-7, 1 + 2**-7),
        (torch.bfloat16, 2 - 2**-20, 2 - 2**-7),
        # float16 has 11: 2^-10.
        (torch.float16, 1 + 2**-11 + 2**-12, 1.0),
        (torch.float16, 2049.9, 2048.0),
        # The smallest denormals: 2^-24 and 2^-133.
        (torch.float16, 1.99 * 2**-24, 2**-24),
        (torch.float16, 0.99 * 2**-24, 0.0),
        (torch.bfloat16, 1.5 * 2**-133, 2**-133),
    ],
)
def test_next_smaller_magnitude_is_taken(
    dtype: torch.dtype, value: float, expected: float, sign: float
) -> None:
    assert round_toward_zero(tensor(sign * value), dtype).tolist() == [sign * expected]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_too_large_a_magnitude_becomes_the_largest(dtype: torch.dtype) -> None:
    wide = torch.float64 if dtype is torch.float32 else torch.float32
    largest = torch.finfo(dtype).max
    beyond = min(largest * 1.5, torch.finfo(wide).max)
    assert round_toward_zero(tensor(beyond, -beyond, dtype=wide), dtype).tolist() == [
        largest,
        -largest,
    ]


def test_infinity_nan_and_the_sign_of_zero_stay() -> None:
    rounded = round_toward_zero(tensor(INF, -INF, NAN, -0.0), torch.bfloat16)
    assert rounded[:2].tolist() == [INF, -INF]
    assert rounded[2].isnan()
    assert rounded[3].signbit()


def test_float32_is_truncated_from_float64() -> None:
    values = tensor(1 + 2**-24, 1 + 2**-23 + 2**-24, dtype=torch.float64)
    assert round_toward_zero(values, torch.float32).tolist() == [1.0, 1 + 2**-23]


def test_mean_error_of_truncation_is_its_closed_form() -> None:
    """1 + k/2^15 for all k below 2^15 loses k mod 2^8 in bfloat16, 127.5 on average."""
    steps = torch.arange(2**15, dtype=torch.float32)
    values = 1 + steps / 2**15
    error = round_toward_zero(values, torch.bfloat16).double() - values.double()
    assert float(error.mean()) == -127.5 / 2**15


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1 + 2**-10, 1 + 2**-10),
        (1 + 2**-11, 1.0),  # a tie goes to the even neighbour, here downward
        (1 + 3 * 2**-11, 1 + 2**-9),  # and here upward
        (1 + 2**-11 + 2**-23, 1 + 2**-10),
        (1 + 2**-11 - 2**-23, 1.0),
        (-(1 + 2**-11 + 2**-23), -(1 + 2**-10)),
        (2 - 2**-23, 2.0),
        (0.0, 0.0),
        (2.0**-149, 0.0),
        (INF, INF),
        (-INF, -INF),
    ],
)
def test_tf32_keeps_eleven_significand_bits(value: float, expected: float) -> None:
    assert round_to_tf32(tensor(value)).tolist() == [expected]


def test_tf32_keeps_nan_and_overflows_where_the_format_ends() -> None:
    payload_in_the_dropped_bits = torch.tensor([0x7F800001], dtype=torch.int32)
    assert round_to_tf32(payload_in_the_dropped_bits.view(torch.float32)).isnan().all()
    assert round_to_tf32(tensor(NAN)).isnan().all()
    largest = float_format("tf32").largest
    assert round_to_tf32(tensor(largest)).tolist() == [largest]
    assert round_to_tf32(tensor(torch.finfo(torch.float32).max)).tolist() == [INF]


def test_tf32_rounds_every_value_to_the_nearest_multiple() -> None:
    generator = torch.Generator().manual_seed(0)
    values = 1 + torch.rand(2000, generator=generator)
    for value, rounded in zip(values.tolist(), round_to_tf32(values).tolist(), strict=True):
        steps = Fraction(value) * 2**10
        # round() of a fraction goes to the even neighbour on a tie, too.
        assert Fraction(rounded) == Fraction(round(steps), 2**10)


def test_e4m3_without_a_scale_is_the_format() -> None:
    """448 needs no scale; spacing is 2 from 16 and 32 from 256."""
    values = tensor(448.0, 17.0, 19.0, 21.0, 300.0, -1.0625, 1.0)
    assert round_to_scaled_e4m3(values).tolist() == [448.0, 16.0, 20.0, 20.0, 288.0, -1.0, 1.0]
    assert torch.finfo(torch.float8_e4m3fn).max == 448.0


def test_e4m3_flushes_what_is_below_half_its_smallest_denormal() -> None:
    """With 448 in the tensor the smallest number is 2^-9."""
    values = tensor(448.0, 2**-9, 0.75 * 2**-9, 0.25 * 2**-9)
    assert round_to_scaled_e4m3(values).tolist() == [448.0, 2**-9, 2**-9, 0.0]


@pytest.mark.parametrize("power", [-120, -20, -1, 1, 20, 100])
def test_scale_of_e4m3_is_a_power_of_two(power: int) -> None:
    values = tensor(448.0, 17.0, 1.0625) * 2.0**power
    assert round_to_scaled_e4m3(values).tolist() == [
        448.0 * 2.0**power,
        16.0 * 2.0**power,
        1.0 * 2.0**power,
    ]


def test_scale_is_the_smallest_that_fits() -> None:
    """450 needs the scale 2, so 225 is rounded to 224; 3.5 = 448 / 128 needs 2^-7."""
    assert round_to_scaled_e4m3(tensor(450.0)).tolist() == [448.0]
    assert round_to_scaled_e4m3(tensor(3.5, 2**-16, 2**-18)).tolist() == [3.5, 2**-16, 0.0]


def test_smallest_scale_leaves_the_smallest_bfloat16_alone() -> None:
    """2^-133 is 2^-7 times 2^-126, a number of e4m3; 1.0625 of it is rounded to it."""
    assert round_to_scaled_e4m3(tensor(2.0**-133)).tolist() == [2.0**-133]
    assert round_to_scaled_e4m3(tensor(1.0625 * 2.0**-130)).tolist() == [2.0**-130]


def test_largest_bfloat16_has_a_scale() -> None:
    largest = torch.finfo(torch.bfloat16).max  # (2 - 2^-7) 2^127 is rounded to 2^128
    assert round_to_scaled_e4m3(tensor(2.0**127, largest)).tolist() == [2.0**127, INF]


def test_e4m3_is_idempotent() -> None:
    generator = torch.Generator().manual_seed(0)
    for exponent in range(-12, 12):
        values = torch.randn(500, generator=generator) * 1.37**exponent
        once = round_to_scaled_e4m3(values)
        assert torch.equal(round_to_scaled_e4m3(once), once)
        assert not torch.equal(once, values)


def test_e4m3_keeps_what_is_not_finite_and_scales_by_the_rest() -> None:
    power = 2.0**20
    rounded = round_to_scaled_e4m3(tensor(INF, -INF, NAN, 17.0 * power, 448.0 * power))
    assert rounded[:2].tolist() == [INF, -INF]
    assert rounded[2].isnan()
    assert rounded[3:].tolist() == [16.0 * power, 448.0 * power]


@pytest.mark.parametrize("values", [tensor(), tensor(0.0, -0.0), tensor(INF, NAN)])
def test_e4m3_leaves_tensors_without_a_finite_nonzero_value_unchanged(values: Tensor) -> None:
    assert torch.equal(round_to_scaled_e4m3(values).nan_to_num(), values.nan_to_num())
