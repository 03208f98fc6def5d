"""Matrix products and sums of the simulated accelerator's variants.

Shapes: B batch (any number of dims), M rows, K terms of a sum, N columns.
"""

import functools
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from assay.devices.sim.numerics import Numerics
from assay.devices.sim.rounding import round_to_scaled_e4m3, round_to_tf32, round_toward_zero

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
        if self._numerics.part_length is not None and dtype is torch.float32:
            return num_terms
        return self._numerics.length_of_part(num_terms)

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
