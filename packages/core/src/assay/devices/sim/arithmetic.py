"""Matrix products, sums and roundings of the simulated accelerator's variants.

Shapes: B batch (any number of dims), M rows, K terms of a sum, N columns. In grouped products, as
mixture-of-experts models use them, each of G groups of the T rows has its own matrix; offsets_G holds the
end of each group, and the first group starts at 0.
"""

import functools
import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from assay.devices.sim.numerics import Numerics
from assay.dtypes import float_format

_INTEGER_OF = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
_E4M3_LARGEST = float_format("float8_e4m3fn").largest

# The scale and its inverse must both be normal numbers of float32, or products would underflow.
_SMALLEST_SCALE_EXPONENT = -126

# TF32 stores the upper 10 of the 23 significand bits of float32.
_TF32_DROPPED_BITS = 13


def round_toward_zero(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to the narrower `dtype` without increasing the magnitude.

    A magnitude above the largest number becomes that number. Infinities and NaN stay.
    """
    nearest = values.to(dtype)
    grew = nearest.to(values.dtype).abs() > values.abs()
    # In sign-magnitude formats the next smaller magnitude is the next smaller integer.
    bits = nearest.view(_INTEGER_OF[dtype])
    return (bits - grew.to(bits.dtype)).view(dtype)


def round_to_tf32(values: Tensor) -> Tensor:
    """Round float32 values to the 11 significand bits of TF32, ties to even."""
    bits = values.view(torch.int32)
    half = (1 << (_TF32_DROPPED_BITS - 1)) - 1
    odd = (bits >> _TF32_DROPPED_BITS) & 1
    rounded = (bits + half + odd) & -(1 << _TF32_DROPPED_BITS)
    return torch.where(values.isfinite(), rounded.view(torch.float32), values)


def round_to_scaled_e4m3(values: Tensor) -> Tensor:
    """Round to e4m3 numbers times one power of two for the whole tensor; return float32.

    The scale is the smallest power of two, at least 2^-126, that brings the largest finite magnitude
    to at most 448, so the rounding is idempotent. Infinities and NaN stay.
    """
    values = values.float()
    largest = float(values.abs().max()) if values.numel() else 0.0
    if not math.isfinite(largest):
        finite = values.isfinite()
        return torch.where(finite, round_to_scaled_e4m3(values.where(finite, 0.0)), values)
    fraction, exponent = math.frexp(largest / _E4M3_LARGEST)
    # frexp returns a fraction in [0.5, 1); 0.5 stands for a power of two.
    exponent = max(exponent - (fraction == 0.5), _SMALLEST_SCALE_EXPONENT)  # noqa: PLR2004
    scaled = (values * math.ldexp(1.0, -exponent)).to(torch.float8_e4m3fn)
    return scaled.float() * math.ldexp(1.0, exponent)


_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
SIMULATED_DTYPES = frozenset(_NAMES)


class Arithmetic:
    """The matrix products and sums of one variant."""

    def __init__(self, numerics: Numerics) -> None:
        self._numerics = numerics

    def multiply(self, left_BMK: Tensor, right_BKN: Tensor) -> Tensor:
        """Compute the matrix product in the dtype of its operands."""
        num_terms = left_BMK.shape[-1]
        dtype = left_BMK.dtype
        if num_terms <= 1:
            return torch.matmul(left_BMK, right_BKN)
        left, right = self._operand(left_BMK), self._operand(right_BKN)
        length = self._length_of_part(num_terms, dtype)
        wide = self._wide_dtype(dtype)
        parts = (
            torch.matmul(
                left[..., start : start + length].to(wide),
                right[..., start : start + length, :].to(wide),
            )
            for start in range(0, num_terms, length)
        )
        return self._add_parts(parts, dtype)

    def multiply_add(
        self, bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1
    ) -> Tensor:
        """Add alpha * left @ right and beta * bias; round after the product and at the end."""
        product = self.multiply(left, right)
        wide = self._wide_dtype(product.dtype)
        total = product.to(wide) * alpha
        if beta:
            total = total + bias.to(wide) * beta
        return self._round(total, product.dtype)

    def add_up(self, values: Tensor, dims: list[int], *, keepdim: bool) -> Tensor:
        """Sum over `dims`, or over all dims for an empty list, in the dtype of `values`."""
        dims = _counted_from_zero(dims, values.ndim)
        dtype = values.dtype
        kept = [dim for dim in range(values.ndim) if dim not in dims]
        shape = [1 if dim in dims else size for dim, size in enumerate(values.shape)]
        num_terms = math.prod(values.shape[dim] for dim in dims)
        rows = values.permute([*kept, *dims])
        rows = rows.reshape([*(values.shape[dim] for dim in kept), num_terms])
        wide = self._wide_dtype(dtype)
        length = self._length_of_part(num_terms, dtype)
        parts = (
            rows[..., start : start + length].to(wide).sum(-1)
            for start in range(0, max(1, num_terms), length)
        )
        total = self._add_parts(parts, dtype)
        return total.reshape(shape) if keepdim else total

    def average(self, values: Tensor, dims: list[int], *, keepdim: bool) -> Tensor:
        """Divide the sum over `dims` by the number of terms, and round once more."""
        total = self.add_up(values, dims, keepdim=keepdim)
        count = math.prod(values.shape[dim] for dim in _counted_from_zero(dims, values.ndim))
        return self._round(total.to(self._wide_dtype(total.dtype)) / count, total.dtype)

    @property
    def changes_sums(self) -> bool:
        """Return True if sums and means differ from the host's, and not only matrix products."""
        return self._numerics.num_parts > 1 or self._numerics.rounding == "zero"

    def _length_of_part(self, num_terms: int, dtype: torch.dtype) -> int:
        """Return the terms in each part of a sum; the last part may have fewer."""
        numerics = self._numerics
        if numerics.part_length is not None:
            return num_terms if dtype is torch.float32 else numerics.part_length
        return max(1, -(-num_terms // numerics.num_parts))

    def _wide_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if self._numerics.rounding == "zero" and dtype is torch.float32:
            return torch.float64
        return torch.float32

    def _operand(self, values: Tensor) -> Tensor:
        format_name = self._numerics.operands_in(_NAMES[values.dtype])
        if format_name == "tf32":
            return round_to_tf32(values)
        if format_name == "float8_e4m3fn":
            return round_to_scaled_e4m3(values)
        return values

    def _round(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        if self._numerics.rounding == "zero":
            return round_toward_zero(values, dtype)
        return values.to(dtype)

    def _add_parts(self, parts: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
        return functools.reduce(torch.add, (self._round(part, dtype) for part in parts))


def _counted_from_zero(dims: list[int], num_dims: int) -> list[int]:
    """Return `dims` counted from 0; all dims for an empty list or a tensor without dims."""
    if not dims or not num_dims:
        return list(range(num_dims))
    return sorted(dim % num_dims for dim in dims)


def grouped_multiply(
    arithmetic: Arithmetic,
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute `torch.nn.functional.grouped_mm` for its four combinations of shapes.

    TK by GKN, GMK by KT, MT by TN (a sum over each group, so GMN), and GMK by GKN.
    Rows after the last group are zero.
    """
    if offs is None:
        product = arithmetic.multiply(left, right)
    elif left.ndim == right.ndim:
        product = left.new_zeros(offs.numel(), left.shape[0], right.shape[1])
        for group, rows in _groups(offs):
            product[group] = arithmetic.multiply(left[:, rows], right[rows])
    elif left.ndim < right.ndim:
        product = left.new_zeros(left.shape[0], right.shape[2])
        for group, rows in _groups(offs):
            product[rows] = arithmetic.multiply(left[rows], right[group])
    else:
        product = left.new_zeros(left.shape[1], right.shape[1])
        for group, rows in _groups(offs):
            product[:, rows] = arithmetic.multiply(left[group], right[:, rows])
    if bias is not None:
        product = product + bias
    return product if out_dtype is None else product.to(out_dtype)


def grouped_multiply_backward(
    arithmetic: Arithmetic, left_TK: Tensor, right_GKN: Tensor, offs: Tensor, gradient_TN: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of both operands of TK by GKN from the product's gradient."""
    return (
        grouped_multiply(arithmetic, gradient_TN, right_GKN.transpose(1, 2), offs),
        grouped_multiply(arithmetic, left_TK.T, gradient_TN, offs),
    )


def _groups(offsets_G: Tensor) -> Iterator[tuple[int, slice]]:
    start = 0
    for group, end in enumerate(offsets_G.tolist()):
        yield group, slice(start, end)
        start = end
