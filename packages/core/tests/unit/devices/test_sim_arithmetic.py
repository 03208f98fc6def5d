"""Sums and products of every variant, by hand and within their documented bounds.

Where a sum is written down, 256 is where bfloat16 steps by 2, 2048 where float16 does and 2^24
where float32 does: 1 more is a tie there and is lost.
"""

import math

import pytest
import torch
from torch import Tensor

from assay.devices.sim import (
    VARIANTS,
    Arithmetic,
    Numerics,
    grouped_multiply,
    grouped_multiply_backward,
    numerics_of,
)
from assay.dtypes import float_format
from assay.errors import UsageError

FIRST_LOST = {torch.bfloat16: 256, torch.float16: 2048, torch.float32: 2**24}


def arithmetic(variant: str) -> Arithmetic:
    return Arithmetic(VARIANTS[variant])


def terms(dtype: torch.dtype, *ones_after: int) -> Tensor:
    """The number from which 1 is lost, then ones and zeros."""
    return torch.tensor([FIRST_LOST[dtype], *ones_after], dtype=dtype)


def product_of_terms(variant: str, values: Tensor) -> float:
    ones = torch.ones(values.numel(), 1, dtype=values.dtype)
    return float(arithmetic(variant).multiply(values[None], ones))


@pytest.mark.parametrize(
    ("variant", "dtype", "gained"),
    [
        # (n + 1) + (0 + 1) + (1 + 0) + (1 + 0): each 1 is lost alone.
        *(("split4", dtype, 0) for dtype in FIRST_LOST),
        # (n + 1 + 0 + 1) + (1 + 0 + 1 + 0): 2 and 2 are kept. (In float32 the first part is
        # added up in the format itself, in an order that is the host's.)
        ("split2", torch.bfloat16, 4),
        ("split2", torch.float16, 4),
        # n + 4 is a number of the format.
        *(("truncate", dtype, 4) for dtype in FIRST_LOST),
    ],
)
def test_sum_by_parts_loses_what_each_part_is_too_small_for(
    variant: str, dtype: torch.dtype, gained: int
) -> None:
    values = terms(dtype, 1, 0, 1, 1, 0, 1, 0)
    expected = FIRST_LOST[dtype] + gained
    assert product_of_terms(variant, values) == expected
    assert float(arithmetic(variant).add_up(values, [], keepdim=False)) == expected


@pytest.mark.parametrize("dtype", FIRST_LOST)
def test_truncation_drops_what_nearest_would_round_up(dtype: torch.dtype) -> None:
    """n + 3 lies between n + 2 and n + 4; the even neighbour is n + 4."""
    values = terms(dtype, 1, 1, 1)
    n = FIRST_LOST[dtype]
    assert product_of_terms("truncate", values) == n + 2
    assert product_of_terms("truncate", -values) == -(n + 2)
    assert float(arithmetic("truncate").add_up(values, [0], keepdim=False)) == n + 2
    assert float(values.double().sum().to(dtype)) == n + 4


def test_last_part_may_be_shorter() -> None:
    """Ten terms in four parts are 3 + 3 + 3 + 1; (256 + 1 + 1) + 3 + 3 + 1 by steps of 2."""
    values = terms(torch.bfloat16, *[1] * 9)
    # 258 + 3 = 261 -> 260, + 3 = 263 -> 264 (even), + 1 = 265 -> 264.
    assert product_of_terms("split4", values) == 264


def test_fewer_terms_than_parts_are_added_one_by_one() -> None:
    assert product_of_terms("split4", terms(torch.bfloat16, 1, 1)) == 256


def test_fp16acc_rounds_after_every_sixteenth_term() -> None:
    values = torch.zeros(48, dtype=torch.float16)
    values[0], values[15], values[16], values[32] = 2048, 2, 1, 1
    # 2050 + 1 = 2051 -> 2052 (even), + 1 = 2053 -> 2052; the exact sum 2052 hides both.
    assert product_of_terms("fp16acc", values) == 2052
    values[32] = 0
    assert product_of_terms("fp16acc", values) == 2052
    values[15], values[16] = 0, 1
    assert product_of_terms("fp16acc", values) == 2048
    values[7], values[8], values[16] = 1, 1, 0
    assert product_of_terms("fp16acc", values) == 2050  # 2048 + 1 + 1 in one part


def test_fp16acc_leaves_float32_as_the_host_makes_it() -> None:
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(8, 96, generator=generator)
    assert torch.equal(arithmetic("fp16acc").multiply(left, left.T), left @ left.T)


def test_fp16acc_overflows_where_float16_ends() -> None:
    values = torch.zeros(48, dtype=torch.float16)
    values[0], values[16], values[32] = 40_000, 40_000, -40_000
    assert product_of_terms("fp16acc", values) == math.inf
    assert product_of_terms("truncate", values) == 40_000


def test_tf32_rounds_operands_of_float32_only() -> None:
    value = 1 + 2**-11
    single = torch.tensor([value, 0.0])
    assert product_of_terms("tf32", single) == 1.0
    assert product_of_terms("split2", single) == value
    half = torch.tensor([1 + 2**-10, 0.0], dtype=torch.float16)
    assert product_of_terms("tf32", half) == 1 + 2**-10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp8_rounds_operands_of_16_bits_only(dtype: torch.dtype) -> None:
    assert product_of_terms("fp8", torch.tensor([17.0, 448.0], dtype=dtype)) == 464.0
    assert product_of_terms("fp8", torch.tensor([17.0, 448.0])) == 465.0


@pytest.mark.parametrize("variant", VARIANTS)
def test_product_of_one_term_is_unchanged(variant: str) -> None:
    """Positions times frequencies: rounding them would be a fault, not an accelerator."""
    positions = torch.tensor([[1001.0], [2047.0]])
    frequencies = torch.tensor([[1.0, 0.7498942]])
    assert torch.equal(
        arithmetic(variant).multiply(positions, frequencies), positions * frequencies
    )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 0, 3), (2, 3, 0)])
def test_empty_products_have_torchs_shapes(variant: str, shape: tuple[int, int, int]) -> None:
    num_rows, num_terms, num_columns = shape
    left, right = torch.ones(num_rows, num_terms), torch.ones(num_terms, num_columns)
    assert torch.equal(arithmetic(variant).multiply(left, right), left @ right)


def test_bias_is_added_to_the_finished_product() -> None:
    """256 + 1 is rounded to 256 before 1 is added and lost again."""
    left = terms(torch.bfloat16, 1)[None]
    right = torch.ones(2, 1, dtype=torch.bfloat16)
    bias = torch.ones(1, dtype=torch.bfloat16)
    assert float(arithmetic("truncate").multiply_add(bias, left, right)) == 256
    assert float(arithmetic("truncate").multiply_add(bias * 3, left, right)) == 258
    assert float(arithmetic("split2").multiply_add(bias * 3, left, right)) == 260
    assert float(arithmetic("split2").multiply_add(bias, left, right, beta=4, alpha=0.5)) == 132
    no_bias = torch.full((1,), math.nan, dtype=torch.bfloat16)
    assert float(arithmetic("split2").multiply_add(no_bias, left, right, beta=0)) == 256


@pytest.mark.parametrize(
    ("dims", "keepdim", "shape"),
    [([], False, ()), ([1], False, (2, 4)), ([-1, 0], True, (1, 3, 1)), ([0, 1, 2], False, ())],
)
def test_sums_have_the_shape_that_torch_gives(
    dims: list[int], shape: tuple[int, ...], *, keepdim: bool
) -> None:
    values = torch.arange(24.0).reshape(2, 3, 4)
    total = arithmetic("split4").add_up(values, dims, keepdim=keepdim)
    assert total.shape == shape
    assert torch.equal(total, values.sum(dims, keepdim=keepdim))


def test_sum_of_one_number_and_of_none() -> None:
    assert float(arithmetic("split4").add_up(torch.tensor(3.0), [-1], keepdim=False)) == 3.0
    assert float(arithmetic("split4").add_up(torch.ones(0), [], keepdim=False)) == 0.0
    assert arithmetic("split4").average(torch.ones(0), [], keepdim=False).isnan()


def test_mean_is_the_sum_divided_and_rounded() -> None:
    """256 by parts, instead of 260, over 8 terms; and a third, truncated."""
    values = terms(torch.bfloat16, 1, 0, 1, 1, 0, 1, 0)
    assert float(arithmetic("split4").average(values, [0], keepdim=False)) == 32.0
    third = float(arithmetic("truncate").average(torch.tensor([1.0, 0.0, 0.0]), [0], keepdim=False))
    assert third == float.fromhex("0x1.555554p-2")  # 1/3 lies above it and nearer to ...556p-2


@pytest.mark.parametrize(
    ("variant", "changes"), [("split2", True), ("truncate", True), ("fp8", False)]
)
def test_only_split_and_truncated_sums_differ(variant: str, *, changes: bool) -> None:
    assert arithmetic(variant).changes_sums is changes


def documented_bound(numerics: Numerics, dtype: str, left: Tensor, right: Tensor) -> Tensor:
    """The bounds of `assay.devices.sim`, with second-order terms, all in float64."""
    num_terms = left.shape[-1]
    unit = float_format(dtype).unit_roundoff
    sums, exact = left.abs() @ right.abs(), (left @ right).abs()
    in_parts = num_terms * float_format("float32").unit_roundoff * sums
    if numerics.rounding == "zero":
        return in_parts + 2 * unit * exact
    if numerics.operands == "tf32" and dtype == "float32":
        return in_parts + ((1 + 2**-11) ** 2 - 1) * sums + 2 * unit * exact
    if numerics.operands == "float8_e4m3fn":
        errors = [torch.maximum(x.abs() * 2**-4, x.abs().max() * 2**-17) for x in (left, right)]
        wrong = errors[0] @ right.abs() + left.abs() @ errors[1] + errors[0] @ errors[1]
        return in_parts + (1 + unit) * wrong + unit * exact
    length = numerics.part_length or -(-num_terms // numerics.num_parts)
    num_parts = -(-num_terms // length)
    return in_parts + ((1 + unit) ** num_parts - 1) * sums


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [(variant, dtype) for variant, numerics in VARIANTS.items() for dtype in numerics.dtypes],
)
def test_no_product_is_further_off_than_documented(variant: str, dtype: str) -> None:
    generator = torch.Generator().manual_seed(0)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    largest_share = 0.0
    for num_terms in (2, 7, 96, 256):
        spread = torch.randn(num_terms, generator=generator).mul(3).exp()
        left = (torch.randn(20, num_terms, generator=generator) * spread).to(torch_dtype)
        right = torch.randn(num_terms, 30, generator=generator).to(torch_dtype)
        actual = arithmetic(variant).multiply(left, right)
        assert actual.dtype is torch_dtype
        expected = left.double() @ right.double()
        error = (actual.double() - expected).abs()
        bound = documented_bound(VARIANTS[variant], dtype, left.double(), right.double())
        assert (error <= bound).all()
        largest_share = max(largest_share, float((error / bound).max()))
    # A bound that no product comes near would not describe the variant.
    assert largest_share > 0.02


def test_splitting_and_truncating_do_worse_than_one_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(64, 96, generator=generator).bfloat16()
    right = torch.randn(96, 64, generator=generator).bfloat16()
    exact = left.double() @ right.double()

    def error(product: Tensor) -> float:
        return float((product.double() - exact).norm() / exact.norm())

    once = error(exact.bfloat16())
    # Independent roundings add up by squares: P of parts of 1/P of the variance, P - 1 of sums.
    assert 1.2 < error(arithmetic("split2").multiply(left, right)) / once < 2.0
    assert 1.4 < error(arithmetic("split4").multiply(left, right)) / once < 2.5
    # The error is uniform over one unit instead of over half: its square is 4 times as large.
    assert error(arithmetic("truncate").multiply(left, right)) / once == pytest.approx(2, rel=0.1)


OFFSETS = torch.tensor([2, 2, 5], dtype=torch.int32)


def test_groups_of_rows_are_multiplied_by_their_own_matrix() -> None:
    left = torch.arange(12.0).reshape(6, 2)
    right = torch.arange(12.0).reshape(3, 2, 2)
    product = grouped_multiply(arithmetic("split2"), left, right, OFFSETS)
    assert torch.equal(product[:2], left[:2] @ right[0])
    assert torch.equal(product[2:5], left[2:5] @ right[2])
    assert torch.equal(product[5:], torch.zeros(1, 2))


def test_groups_of_columns_are_multiplied_by_their_own_matrix() -> None:
    left = torch.arange(12.0).reshape(3, 2, 2)
    right = torch.arange(10.0).reshape(2, 5)
    product = grouped_multiply(arithmetic("split2"), left, right, OFFSETS)
    assert torch.equal(product[:, :2], left[0] @ right[:, :2])
    assert torch.equal(product[:, 2:], left[2] @ right[:, 2:])


def test_sums_over_groups_are_kept_apart() -> None:
    left, right = torch.arange(10.0).reshape(2, 5), torch.arange(15.0).reshape(5, 3)
    product = grouped_multiply(arithmetic("split2"), left, right, OFFSETS)
    assert torch.equal(product[0], left[:, :2] @ right[:2])
    assert torch.equal(product[1], torch.zeros(2, 3))
    assert torch.equal(product[2], left[:, 2:] @ right[2:])


def test_without_groups_matrices_are_multiplied_pairwise_and_a_bias_is_added() -> None:
    left, right = torch.arange(8.0).reshape(2, 2, 2), torch.arange(8.0).reshape(2, 2, 2)
    product = grouped_multiply(arithmetic("split2"), left, right, bias=torch.ones(2))
    assert torch.equal(product, left @ right + 1)
    wide = grouped_multiply(arithmetic("split2"), left, right, out_dtype=torch.float64)
    assert wide.dtype is torch.float64


def test_gradients_of_grouped_products_are_the_products_of_calculus() -> None:
    left = torch.arange(10.0).reshape(5, 2).requires_grad_()
    right = torch.arange(12.0).reshape(3, 2, 2).requires_grad_()
    gradient = torch.arange(10.0).reshape(5, 2) - 4
    torch.cat([left[:2] @ right[0], left[2:] @ right[2]]).backward(gradient)
    to_left, to_right = grouped_multiply_backward(
        arithmetic("split2"), left.detach(), right.detach(), OFFSETS, gradient
    )
    assert left.grad is not None
    assert right.grad is not None
    assert torch.equal(to_left, left.grad)
    assert torch.equal(to_right, right.grad)


def test_unknown_variant_names_the_known_ones() -> None:
    assert numerics_of("") is VARIANTS["split4"]
    with pytest.raises(UsageError) as raised:
        numerics_of("fp4")
    assert str(raised.value) == (
        "unknown device 'sim:fp4'; there is: sim, sim:split2, sim:split4, sim:truncate, "
        "sim:tf32, sim:fp16acc, sim:fp8"
    )
