"""The simulated device in model code: which operations it replaces."""

import copy
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor

from assay.devices.base import SuspendedExecution
from assay.devices.cpu import CpuDevice
from assay.devices.sim import (
    VARIANTS,
    SimDevice,
    round_to_scaled_e4m3,
    round_to_tf32,
    round_toward_zero,
)
from assay.dtypes import float_format
from packages.core.tests.unit.devices.protocol_checks import check_device_protocol

GRADIENT_MODES = (torch.enable_grad, torch.no_grad, torch.inference_mode)

# 256 and four ones: 260 in one rounding, 256 in four parts, as test_arithmetic.py works out.
ROW = torch.tensor([[256, 1, 0, 1, 1, 0, 1, 0]], dtype=torch.bfloat16)
ONES = torch.ones(8, 1, dtype=torch.bfloat16)
WHOLE, BY_PARTS = 260.0, 256.0


@pytest.mark.parametrize("variant", ["", *VARIANTS])
def test_every_variant_implements_the_protocol(variant: str) -> None:
    check_device_protocol(SimDevice(variant))


def test_simulated_device_has_its_own_name_and_the_torch_device_of_the_host() -> None:
    assert (SimDevice().name, SimDevice().torch_device) == ("sim", "cpu")
    assert SimDevice("fp8").name == "sim:fp8"
    assert SimDevice().architecture() == SimDevice("split4").architecture() == "sim-split4"
    assert SimDevice().vendor.name == "sim"


@pytest.mark.parametrize(
    ("variant", "dtypes"),
    [
        ("split4", ("float32", "bfloat16", "float16")),
        ("fp8", ("bfloat16", "float16")),
        ("fp16acc", ("float16",)),
    ],
)
def test_no_variant_has_float64(variant: str, dtypes: tuple[str, ...]) -> None:
    assert SimDevice(variant).supported_dtypes() == dtypes


@pytest.mark.parametrize(
    ("variant", "dtype", "precision"),
    [
        ("tf32", "float32", "tf32"),
        ("tf32", "bfloat16", "bfloat16"),
        ("fp8", "bfloat16", "float8_e4m3fn"),
        ("fp8", "float16", "float8_e4m3fn"),
        ("split4", "float32", "float32"),
        ("truncate", "bfloat16", "bfloat16"),
    ],
)
def test_precision_of_operands_is_reported(variant: str, dtype: str, precision: str) -> None:
    assert SimDevice(variant).effective_precision(dtype) == precision


PRODUCTS: dict[str, Callable[[], Tensor]] = {
    "matmul": lambda: ROW @ ONES,
    "matmul of vectors": lambda: ROW[0] @ ONES[:, 0],
    "matrix times vector": lambda: ROW @ ONES[:, 0],
    "batched": lambda: ROW.expand(2, 1, 8) @ ONES,
    "many batches": lambda: ROW.expand(2, 3, 1, 8) @ ONES.expand(2, 3, 8, 1),
    "linear": lambda: F.linear(ROW.expand(2, 3, 8), ONES.T),
    "linear with a bias": lambda: F.linear(ROW, ONES.T, torch.zeros(1, dtype=torch.bfloat16)),
    "addmv": lambda: torch.addmv(torch.zeros(3, dtype=torch.bfloat16), ROW.expand(3, 8), ONES[:, 0]),
    "baddbmm": lambda: torch.baddbmm(
        torch.zeros(1, 1, 1, dtype=torch.bfloat16), ROW[None], ONES[None], beta=0
    ),
    "einsum": lambda: torch.einsum("bk,kn->bn", ROW, ONES),
    "inner": lambda: torch.inner(ROW, ONES.T),
    "sum": ROW.sum,
    "sum over a dim": lambda: ROW.sum(-1),
    "mean": lambda: ROW.mean() * 8,
    "mean over a dim": lambda: ROW.mean(1, keepdim=True) * 8,
}  # fmt: skip


@pytest.mark.parametrize("gradient_mode", GRADIENT_MODES)
@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS.keys())
def test_model_code_adds_up_by_parts_inside_and_as_before_outside(
    product: Callable[[], Tensor], gradient_mode: Callable[[], AbstractContextManager[None]]
) -> None:
    plain = product()
    with gradient_mode(), SimDevice("split4").execution():
        simulated = product()
    assert set(simulated.flatten().tolist()) == {BY_PARTS}
    assert simulated.shape == plain.shape
    assert simulated.dtype == plain.dtype
    assert set(plain.flatten().tolist()) == {WHOLE}
    assert set(product().flatten().tolist()) == {WHOLE}


@pytest.mark.skipif(
    not hasattr(F, "grouped_mm"), reason="torch.nn.functional.grouped_mm came with torch 2.10"
)
@pytest.mark.parametrize("gradient_mode", GRADIENT_MODES)
def test_grouped_products_add_up_by_parts(
    gradient_mode: Callable[[], AbstractContextManager[None]],
) -> None:
    offsets = torch.tensor([2, 3], dtype=torch.int32)
    weights = torch.ones(2, 8, 8, dtype=torch.bfloat16)
    with gradient_mode(), SimDevice("split4").execution():
        product = F.grouped_mm(ROW.expand(3, 8).contiguous(), weights, offs=offsets)
    assert set(product.flatten().tolist()) == {BY_PARTS}


def test_gradients_are_simulated_as_well() -> None:
    """The gradient of the left operand is a product with the right one: 256 + 1 + ... again."""
    left = torch.ones(1, 1, dtype=torch.bfloat16).repeat(1, 2).requires_grad_()
    right = ROW.repeat(2, 1)
    with SimDevice("split4").execution():
        (left @ right).backward(ONES.T)
    assert left.grad is not None
    assert left.grad.tolist() == [[BY_PARTS, BY_PARTS]]


def test_each_row_gets_its_own_bias() -> None:
    bias = torch.tensor([0, 256, 512], dtype=torch.bfloat16)
    with SimDevice("split4").execution():
        vector = torch.addmv(bias, ROW.expand(3, 8), ONES[:, 0])
        matrix = torch.addmm(bias, ROW.expand(2, 8), ONES.expand(8, 3))
    assert vector.tolist() == [256, 512, 768]
    assert matrix.tolist() == [[256, 512, 768]] * 2


def test_sum_in_another_dtype_is_made_there() -> None:
    with SimDevice("split4").execution():
        assert float(ROW.sum(dtype=torch.float32)) == WHOLE
        # The first part, 2^24 + 1, is beyond float32.
        large = torch.tensor([2.0**24, 1, 0, 0, 0, 0, 0, 0])
        assert float(large.sum(dtype=torch.float64)) == 2.0**24 + 1
        assert float(large.sum()) == 2.0**24


def test_float64_and_integers_are_unchanged() -> None:
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(8, 32, dtype=torch.float64, generator=generator)
    plain = (left @ left.T, left.sum(), left.mean(0))
    with SimDevice("split4").execution():
        simulated = (left @ left.T, left.sum(), left.mean(0))
        assert int(torch.tensor([2**40, 1]).sum()) == 2**40 + 1
        assert int(torch.tensor([True, True]).sum()) == 2
    for actual, expected in zip(simulated, plain, strict=True):
        assert torch.equal(actual, expected)


def test_attention_is_made_of_simulated_products() -> None:
    """One query and one key: the softmax is 1, so the output is the value; with two equal keys
    it is their mean, a product of two terms that tf32 rounds first.
    """
    query = torch.ones(1, 1, 1, 4)
    key = torch.ones(1, 1, 2, 4)
    value = torch.full((1, 1, 2, 4), 1 + 2**-11)
    plain = F.scaled_dot_product_attention(query, key, value)
    for gradient_mode in GRADIENT_MODES:
        with gradient_mode(), SimDevice("tf32").execution():
            simulated = F.scaled_dot_product_attention(query, key, value)
        assert set(simulated.flatten().tolist()) == {1.0}
    assert set(plain.flatten().tolist()) == {1 + 2**-11}


def test_attention_kernels_are_allowed_again_afterwards() -> None:
    before = torch.backends.cuda.flash_sdp_enabled()
    with pytest.raises(RuntimeError), SimDevice().execution():
        raise RuntimeError
    assert torch.backends.cuda.flash_sdp_enabled() == before
    assert float(ROW @ ONES) == WHOLE


def test_measurement_within_a_run_is_not_simulated() -> None:
    seen = []

    def measure(module: torch.nn.Module, arguments: tuple[Tensor], output: Tensor) -> None:
        with SuspendedExecution():
            seen.append(float(arguments[0].sum()))
            thread = threading.Thread(target=lambda: seen.append(float(ROW.sum())))
            thread.start()
            thread.join()
        seen.append(float(output))

    layer = torch.nn.Linear(8, 1, bias=False, dtype=torch.bfloat16)
    torch.nn.init.ones_(layer.weight)
    layer.register_forward_hook(measure)
    with torch.inference_mode(), SimDevice("split4").execution():
        after = float(layer(ROW) + ROW.sum())
    assert seen == [WHOLE, WHOLE, BY_PARTS]
    assert after == 2 * BY_PARTS


def test_repeated_run_is_bitwise_equal() -> None:
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.LayerNorm(128), torch.nn.Linear(128, 32)
    )
    inputs = torch.randn(16, 64, generator=generator)
    for dtype in (torch.float32, torch.bfloat16):
        candidate = copy.deepcopy(model).to(dtype)
        with torch.inference_mode(), SimDevice().execution():
            first, second = candidate(inputs.to(dtype)), candidate(inputs.to(dtype))
            plain = CpuDevice()
        with torch.inference_mode(), plain.execution():
            host = candidate(inputs.to(dtype))
        assert torch.equal(first, second)
        assert not torch.equal(first, host)


@pytest.mark.parametrize("compile_backend", ["eager"])
def test_compiled_model_is_simulated(compile_backend: str) -> None:
    assert SimDevice().vendor.compile_backend == compile_backend

    @torch.compile(backend=compile_backend)
    def add_up(row: Tensor) -> Tensor:
        return row @ ONES

    with torch.no_grad(), SimDevice("split4").execution():
        assert float(add_up(ROW)) == BY_PARTS


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
