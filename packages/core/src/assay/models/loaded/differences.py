"""Measure how far and in which rows a tensor differs from its expected values."""

import torch
from torch import Tensor

from assay.models.loaded.report import WeightDifference, WeightProblem

# Elements that are cast at a time, to fit the caches of one core.
_CHUNK = 1 << 18


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Return True if both hold the same bits: a NaN equals itself, and -0 differs from 0."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    sides = [one.detach().contiguous().reshape(-1).view(torch.uint8) for one in (actual, expected)]
    # 64-bit integers compare fastest. A tensor of a mapped file may begin at any byte.
    if all(one.numel() % 8 == 0 and one.storage_offset() % 8 == 0 for one in sides):
        sides = [one.view(torch.int64) for one in sides]
    return torch.equal(*sides)


def is_cast_of(actual: Tensor, stored: Tensor) -> bool:
    """Return True if `actual` is bitwise equal to `stored`, of the same shape, after a cast.

    Casts a few megabytes at a time, into memory that is reused.
    """
    if actual.dtype == stored.dtype:
        return same_bits(actual, stored)
    flat, wanted = actual.detach().reshape(-1), stored.reshape(-1)
    return all(
        same_bits(flat[start : start + _CHUNK], wanted[start : start + _CHUNK].to(actual.dtype))
        for start in range(0, len(flat), _CHUNK)
    )


def count_non_finite(tensor: Tensor) -> int:
    """Count NaN and infinity; return 0 for a dtype of one byte, which torch cannot search."""
    if tensor.element_size() == 1 or bool(tensor.sum().isfinite()):
        return 0
    return int((~tensor.isfinite()).sum())


def measure_difference(
    name: str,
    actual: Tensor,
    expected: Tensor,
    dtype: torch.dtype,
    problem: WeightProblem = "differs",
) -> WeightDifference | None:
    """Measure how `actual` differs from `expected`; return None if the values are equal.

    Shapes: equal. Device: CPU.
    dtype: the coarser dtype to which either side was rounded. Its units in the last place measure
        the largest difference.
    """
    if same_bits(actual, expected):
        return None
    actual_rows, expected_rows = (
        one.detach().flatten(1) if one.dim() > 1 else one.detach().reshape(-1, 1)
        for one in (actual, expected)
    )
    # NaN equals NaN.
    differs = (actual_rows != expected_rows) & ~(actual_rows.isnan() & expected_rows.isnan())
    wrong = differs.any(-1).nonzero()[:, 0]
    if not len(wrong):  # zeros of different sign, NaNs of different bits
        return None
    wide = torch.complex128 if actual.is_complex() else torch.float64
    actual_wrong, expected_wrong = actual_rows[wrong].to(wide), expected_rows[wrong].to(wide)
    norm = float(expected_wrong.abs().pow(2).sum().sqrt())
    error = float((actual_wrong - expected_wrong).abs().pow(2).sum().sqrt())
    return WeightDifference(
        name=name,
        problem=problem,
        rows=(int(wrong[0]), int(wrong[-1])),
        num_differing=len(wrong),
        num_rows=len(actual_rows),
        error=error / norm if norm else (float("inf") if error else 0.0),
        largest=_largest_in_units(actual_wrong, expected_wrong, dtype),
    )


def _largest_in_units(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    """Return the largest difference of two elements, in units in the last place of `dtype`.

    Rounding a number to `dtype` in two ways (to nearest, truncated, through another dtype) results in
    neighbors at most, so two values one unit apart may stem from the same number. The unit is that of
    the larger value, so that neighbors across a power of two are one unit apart too.
    Source: Higham, Accuracy and Stability of Numerical Algorithms, 2.1 (spacing of floating-point
    numbers: between u and 2u relative, u the unit roundoff; constant below the smallest normal number).
    """
    difference = (actual - expected).abs()
    if not dtype.is_floating_point:
        return float("inf") if bool(difference.any()) else 0.0
    if not bool(difference.isfinite().all()):
        return float("inf")
    facts = torch.finfo(dtype)
    larger = torch.maximum(actual.abs(), expected.abs()).clamp(min=facts.smallest_normal)
    # frexp: larger = m * 2**e with 1/2 <= m < 1, so the last place is eps * 2**(e - 1).
    unit = torch.ldexp(torch.full_like(larger, facts.eps), larger.frexp().exponent - 1)
    return float((difference / unit).max())
