"""Measure the errors of a quantized weight per group, and the best errors that its format can reach.

The size of an error says little about its cause, so each group's errors e are also fitted as
e = slope x w - offset x s, with the expected values w and the scale s. A scale that is 10% too large
results in slope 0.1, a zero point that is one step too large in offset 1. Errors are measured from exact
rounding with the same scale and zero point, which removes the shape of ordinary rounding errors. Errors
independent of w, such as GPTQ's compensation of earlier columns, leave both at 0. Elements that round to
the lowest or highest level are excluded.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from assay.models.quantization.quantized_weight import Grid, Groups, QuantizedWeight

# With fewer rows per column, the covariance overfits the errors of a group.
_ROWS_PER_COLUMN = 4
_MOST_COLUMNS = 512
# Loss of slope, in columns per row. Measured: 0.33 to 0.52 with 128 of 512, 0.26 with 256 of 2,048.
_MASKED = 2.0
# Part of the mean variance, added to each variance to keep the inverse accurate.
_RIDGE = 1e-3
# Standard deviation over median absolute deviation of normal values.
_NORMAL = 1.4826


@dataclass(frozen=True)
class PooledSlopes:
    """Relative errors of scales: float64 tensors with one number per group."""

    slope: Tensor
    deviation: Tensor
    """Standard deviation of `slope` in honest quantization."""
    usual: Tensor
    """Median slope of the groups of the same columns."""
    gain: float
    """Least part of a wrong scale that `slope` shows, as its error is in the covariance, too."""


def pool_slopes(weight: QuantizedWeight, reference: Tensor) -> PooledSlopes | None:
    """Fit the slope of each group's errors on its expected values.

    Finds wrong scales among errors as large as GPTQ's. GPTQ changes codes so that the errors of one
    column compensate those of earlier ones. The same inputs determine this for all rows, so the errors
    of all rows share one covariance. Generalized least squares uses it to downweight the directions of
    GPTQ's errors. A group whose values are all 10% too large then stands out.

    Returns: None if the groups are not parts of rows, or the rows are too few.
    """
    groups = weight.groups
    (rows, columns), size = groups.weight_shape, groups.block[1]
    width = min(columns, rows // _ROWS_PER_COLUMN, _MOST_COLUMNS) // size * size
    if groups.is_flat or groups.block[0] != 1 or columns % size or not width:
        return None
    expected, error = reference.float(), weight.dequantize().sub_(reference)
    if groups.order is not None:
        expected, error = expected[:, groups.order], error[:, groups.order]
    slope, deviation = torch.zeros(2, *groups.grid_shape, dtype=torch.float64)
    for start in range(0, columns, width):
        w, e = (one[:, start : start + width].double() for one in (expected, error))
        parts = w.view(rows, -1, size)
        plain = (parts * e.view_as(parts)).sum(-1) / parts.square().sum(-1)
        common = plain.nanmedian(0).values[:, None] * parts  # scales wrong in all rows
        remaining = e - common.reshape(e.shape)
        covariance = remaining.t() @ remaining / rows
        covariance.diagonal().add_(_RIDGE * covariance.diagonal().mean())
        factor, is_singular = torch.linalg.cholesky_ex(covariance)
        if int(is_singular):
            return None
        precision = torch.cholesky_inverse(factor)
        # Fit all groups of a row and window together, so that one error does not leak into the others.
        weighted = torch.stack(
            [part @ own for part, own in zip(parts.unbind(1), precision.split(size), strict=True)],
            1,
        )
        products = weighted.view(rows, parts.shape[1], -1, size)
        normal = torch.einsum("rghc,rhc->rgh", products, parts)
        inverse, _ = torch.linalg.inv_ex(normal)
        of_groups = slice(start // size, start // size + parts.shape[1])
        moments = torch.einsum("rgc,rc->rg", weighted, e)
        slope[:, of_groups] = torch.einsum("rgh,rh->rg", inverse, moments)
        deviation[:, of_groups] = inverse.diagonal(dim1=1, dim2=2).sqrt()
    usual = slope.nanmedian(0).values.expand_as(slope)
    spread = _NORMAL * ((slope - usual).abs() / deviation).nanmedian(0).values
    deviation = deviation * spread.clamp(min=1)
    is_known = slope.isfinite() & deviation.isfinite()
    return PooledSlopes(
        torch.where(is_known, slope, 0.0).flatten(),
        torch.where(is_known, deviation, torch.inf).flatten(),
        usual.flatten(),
        1 - _MASKED * width / rows,
    )


# Scales to try, relative to the scale that just covers the largest value. Down to 0.7, clipping outliers
# lowers the error of normal values (4 bits: by a tenth). Above 1 is for ranges such as [-8, 7], whose
# lowest level may stay unused.
_SYMMETRIC_PARTS = (1.07, 1.0, 0.9, 0.8, 0.7)
_SHIFTED_PARTS = (1.0, 0.9, 0.8)

# A determinant below this part of its largest value is rounding error of its float32 terms.
_SINGULAR = 1e-4

# Variance of a uniform error over a cell of width 1.
_UNIFORM_VARIANCE = 1 / 12

# A weight is rounded to nearest if fewer codes than this, in the median row, differ from exact rounding.
# Derived: a factor that AWQ folds in bfloat16 moves a value by up to 8 steps x 2^-9, which changes 1.6 %
# of the codes of 4 bits. Measured for GPTQ: at least 5.5 % (GPTQModel 7.7, inputs almost uncorrelated).
_MOST_OTHER_CODES = 0.03
_OTHER_CODES = 0.02
# Codes of a row that are judged together, whatever the size of their group.
_PART = 64

# Variance of the difference from exact rounding: one step in 5 % of the codes.
_ROUNDED_VARIANCE = 0.05


@dataclass(frozen=True)
class GroupErrors:
    """Measurements of one weight: float64 tensors with one number per group."""

    error: Tensor
    """Relative error of the dequantized values, ||d - w|| / ||w||."""
    best: Tensor
    """Relative error that the best scale and zero point found leave."""
    random: Tensor
    """Relative error that codes drawn at random leave, in the mean."""
    size: Tensor
    """Norm of the expected values, ||w||."""
    slope: Tensor
    """Relative error of the scale."""
    slope_deviation: Tensor
    """Standard deviation of `slope` in honest quantization."""
    offset: Tensor
    """Error of the zero point in steps."""
    offset_deviation: Tensor
    """Standard deviation of `offset` in honest quantization."""
    factor: Tensor
    """The scale as a multiple of the best scale. For codes of exact rounding this is a better estimate
    than 1 + `slope`, which rounds to the wrong scale."""
    other_codes: Tensor
    """Share of unclipped codes that differ from exact rounding and from rounding in the quantizer's
    dtype, above the usual share."""
    other_codes_deviation: Tensor
    """Standard deviation of `other_codes` in a weight rounded to nearest."""
    correlation: Tensor
    """Cosine of the angle between d and w."""
    parts: Tensor
    """Mean squared difference from exact rounding, in steps, of up to 64 codes of a row, over that of the
    same columns in the median row: rows x groups across x parts of a group."""
    pooled: PooledSlopes | None
    """Slopes from errors of all rows; None if the codes are those of exact rounding."""
    is_rounded: bool
    """The codes are those of exact rounding, so any other error stands out."""


def measure_groups(
    weight: QuantizedWeight, reference: Tensor, *, roundoff: float = 0.0, is_exact: bool = True
) -> GroupErrors:
    """Measure every group of `weight` against `reference`, rows x columns of any float dtype.

    roundoff: unit roundoff of the dtype in which the quantizer computed. bitsandbytes and
        compressed-tensors divide by the scale in the model's dtype, and round the quotient again.
    is_exact: False if `reference` is noisy, so that exact rounding proves nothing.
    """
    groups, grid = weight.groups, weight.grid
    candidates = list(_candidates(weight, reference))
    best_squares = torch.zeros(len(candidates), groups.num_groups, dtype=torch.float64)
    sums = _Sums(groups, roundoff)
    for rows in groups.chunks():
        expected = groups.select(reference, rows)
        sums.add(weight, rows, expected)
        for squares, (scales, zeros) in zip(best_squares, candidates, strict=True):
            scale, zero = groups.spread(scales, rows), groups.spread(zeros, rows)
            values = grid.round(expected / scale + zero).sub_(zero).mul_(scale)
            error = groups.clear_filling(values.sub_(expected), rows)
            groups.add(error.square_(), rows, squares)
    best = torch.cat([best_squares, sums.exact_squares[None]]).nan_to_num(torch.inf).amin(0)
    count = sums.count.clamp(min=1)
    other_codes = (sums.others / count - _MOST_OTHER_CODES).clamp(min=0)
    of_rows = sums.others.view(groups.grid_shape).sum(1) / count.view(groups.grid_shape).sum(1)
    is_rounded = is_exact and float(of_rows.nanmedian()) < _MOST_OTHER_CODES
    slope, slope_deviation, offset, offset_deviation = _fit(sums, grid, is_rounded=is_rounded)
    norm = sums.squares.sqrt()
    return GroupErrors(
        error=_ratio(sums.error_squares.sqrt(), norm),
        best=_ratio(best.sqrt(), norm),
        random=_ratio(sums.random_squares(weight).clamp(min=0).sqrt(), norm),
        size=norm,
        slope=slope,
        slope_deviation=slope_deviation,
        offset=-offset,
        offset_deviation=offset_deviation,
        factor=sums.dequantized_squares / sums.products if is_rounded else 1 + slope,
        other_codes=other_codes,
        other_codes_deviation=((_OTHER_CODES + sums.excused_share) / count).sqrt(),
        pooled=None if is_rounded else pool_slopes(weight, reference),
        correlation=sums.products / (norm * sums.dequantized_squares.sqrt()),
        parts=sums.compare_parts(),
        is_rounded=is_rounded,
    )


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    return torch.where(numerator == 0, 0.0, numerator / denominator)


def _nonzero(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 1.0, scales)


def _candidates(weight: QuantizedWeight, reference: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield scales and zero points to try for each group."""
    levels = weight.grid.levels
    low, high = weight.groups.find_range(reference)
    middle = weight.zeros
    if weight.stored_zeros is not None:
        middle = torch.full_like(low, float(levels[0] + levels[-1] + 1) / 2)
    # A symmetric quantizer does not shift, even if the format allows it.
    if weight.stored_zeros is not None and float((middle == weight.zeros).float().mean()) <= 1 / 2:
        for part in _SHIFTED_PARTS:
            scales = _nonzero((high - low) * part / (levels[-1] - levels[0]))
            yield scales, (levels[0] - low * part / scales).round()
    largest = torch.maximum(high, -low)
    for part in _SYMMETRIC_PARTS:
        yield _nonzero(largest * part / (levels[-1] - levels[0]) * 2), middle


class _Sums:
    """Sums over the elements of each group. Those for the fit exclude clipped elements."""

    def __init__(self, groups: Groups, roundoff: float) -> None:
        """roundoff: unit roundoff of the dtype in which the quantizer computed."""
        self.roundoff = roundoff
        num_parts = -(-groups.block[1] // _PART)
        across = groups.grid_shape[1]
        self.part_squares, self.part_counts = torch.zeros(2, groups.shape[0], across, num_parts)
        (
            self.squares, self.total, self.size, self.error_squares, self.exact_squares,
            self.products, self.dequantized_squares, self.others, self.excused, self.count, self.aa,
            self.ac, self.cc, self.au, self.cu, self.uu, self.aauu, self.aaau, self.aaaa,
        ) = torch.zeros(19, groups.num_groups, dtype=torch.float64)  # fmt: skip

    def add(self, weight: QuantizedWeight, rows: slice, expected: Tensor) -> None:
        """Add rows of the divided matrix."""
        groups, grid = weight.groups, weight.grid
        scale = groups.spread(_nonzero(weight.scales), rows)
        zero = groups.spread(weight.zeros, rows)
        quotient = expected / scale
        levels = grid.nearest(quotient + zero)
        exact = groups.clear_filling((grid.levels[levels] - zero).mul_(scale), rows)
        actual = groups.clear_filling(weight.dequantize_rows(rows), rows)
        # In units of the cell: the difference u from exact rounding, expected value a, scale c.
        cell = scale if grid.is_integer else scale * grid.widths[levels]
        u, a, c = (actual - exact) / cell, expected / cell, scale / cell
        is_used = groups.clear_filling(grid.is_inner[levels], rows)
        u, a, c = (torch.where(is_used, one, 0.0) for one in (u, a, c))
        au, aa = a * u, a * a
        stored = actual / scale
        # A quantizer rounds a scale or its inverse, the quotient, and the sum with a zero point. It may
        # also round the codes before it rounds the scale to its stored form.
        shifted = quotient + groups.spread(weight.zeros - weight.middle, rows)
        limit = self.roundoff * (quotient.abs() + shifted.abs())
        limit += groups.spread(weight.scale_precisions.float(), rows) * quotient.abs()
        within = quotient + (stored - quotient).clamp(-limit, limit)
        is_excused = grid.nearest(within + zero) == grid.nearest(stored + zero)
        differs = u.abs() > 1 / 2
        for into, part in (
            (self.squares, expected.square()),
            (self.total, expected),
            (self.size, groups.clear_filling(torch.ones_like(expected), rows)),
            (self.error_squares, (actual - expected).square_()),
            (self.exact_squares, (exact - expected).square_()),
            (self.products, expected * actual),
            (self.dequantized_squares, actual.square()),
            (self.others, differs & ~is_excused),
            (self.excused, differs & is_excused),
            (self.count, is_used),
            (self.aa, aa),
            (self.ac, a * c),
            (self.cc, c * c),
            (self.au, au),
            (self.cu, c * u),
            (self.uu, u * u),
            (self.aauu, au * au),
            (self.aaau, aa * au),
            (self.aaaa, aa * aa),
        ):
            groups.add(part, rows, into)
        self.part_squares[rows], self.part_counts[rows] = _by_part(u * u), _by_part(is_used)

    def compare_parts(self) -> Tensor:
        """Divide the mean squares of the parts by those of the median row, or of uniform errors."""
        means = self.part_squares / self.part_counts.clamp(min=1)
        ratios: Tensor = means / means.nanmedian(0).values.clamp(min=_UNIFORM_VARIANCE)
        return ratios

    @property
    def excused_share(self) -> float:
        """Return the share of codes, in the median group, that rounding in the dtype explains."""
        return float((self.excused / self.count.clamp(min=1)).nanmedian())

    def random_squares(self, weight: QuantizedWeight) -> Tensor:
        """Return the squared error that codes drawn at random leave in each group, in the mean."""
        scale = weight.scales.double()
        levels = scale[:, None] * (weight.grid.levels.double() - weight.zeros.double()[:, None])
        mean, square = levels.mean(1), levels.square().mean(1)
        squares: Tensor = self.size * square - 2 * mean * self.total + self.squares
        return squares


def _by_part(values: Tensor) -> Tensor:
    """Add the elements of each part of a group."""
    missing = -values.shape[-1] % _PART
    parts: Tensor = torch.nn.functional.pad(values, (0, missing)).unflatten(-1, (-1, _PART))
    return parts.sum(-1)


def _fit(sums: _Sums, grid: Grid, *, is_rounded: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Fit slope and offset by least squares; return each with its standard deviation.

    Deviations are infinite for groups with hardly two levels. Unless the codes are those of exact rounding,
    the variance of the errors is measured, and is at least that of a uniform error, the weight's median,
    and for the slope White's estimate.
    Source: White, A Heteroskedasticity-Consistent Covariance Matrix Estimator, Econometrica 48 (1980).
    """
    ac, cu = (sums.ac, sums.cu) if grid.is_integer else torch.zeros(2, *sums.ac.shape)
    determinant = sums.aa * sums.cc - ac.square()
    is_known = determinant > _SINGULAR * (sums.aa * sums.cc).clamp(min=1)
    determinant = torch.where(is_known, determinant, 1.0)
    slope = torch.where(is_known, (sums.cc * sums.au - ac * cu) / determinant, 0.0)
    offset = torch.where(is_known, (sums.aa * cu - ac * sums.au) / determinant, 0.0)
    if is_rounded:
        variance = torch.full_like(slope, max(_ROUNDED_VARIANCE, sums.excused_share))
        white = torch.zeros_like(slope)
    else:
        remaining = sums.uu - slope * sums.au - offset * cu
        variance = (remaining / (sums.count - 2).clamp(min=1)).clamp(min=_UNIFORM_VARIANCE)
        if bool(is_known.any()):
            variance = variance.clamp(min=float(variance[is_known].median()))
        squares = sums.aauu - 2 * slope * sums.aaau + slope.square() * sums.aaaa
        white = squares.clamp(min=0) * (sums.cc / determinant).square()
    slope_variance = torch.maximum(variance * sums.cc / determinant, white)
    offset_variance = variance * sums.aa / determinant
    deviations = [
        torch.where(is_known, one, torch.inf).sqrt() for one in (slope_variance, offset_variance)
    ]
    return slope, deviations[0], offset, deviations[1]
