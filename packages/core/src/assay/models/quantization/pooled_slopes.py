"""Find wrong scales among errors as large as GPTQ's.

GPTQ changes codes so that the errors of one column compensate those of earlier ones. The same inputs
determine this for all rows, so the errors of all rows share one covariance. Generalized least squares
uses it to downweight the directions of GPTQ's errors. A group whose values are all 10% too large then
stands out.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from assay.models.quantization.quantized_weight import QuantizedWeight

# With fewer rows per column, the covariance overfits the errors of a group.
_ROWS_PER_COLUMN = 4
_MOST_COLUMNS = 512
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


def pool_slopes(weight: QuantizedWeight, reference: Tensor) -> PooledSlopes | None:
    """Fit the slope of each group's errors on its expected values.

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
    )
