"""One quantized weight, as all formats are read."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from assay.models.quantization.grids import Grid
from assay.models.quantization.groups import Groups


@dataclass(frozen=True)
class QuantizedWeight:
    """Codes, scales and zero points: an element is (grid value of its code - zero point) x scale."""

    codes: Tensor
    """uint8, in the shape and column order of `groups`."""
    grid: Grid
    groups: Groups
    scales: Tensor
    """One a group, float32."""
    scale_precision: float
    """Relative error of a scale from the dtype in which it is stored."""
    stored_zeros: Tensor | None = None
    """Zero points, one a group, in grid values, float32; None if they are all `middle`."""
    middle: float = 0.0

    @cached_property
    def zeros(self) -> Tensor:
        """Return the zero points, one a group."""
        constant = torch.full((self.groups.num_groups,), self.middle)
        return constant if self.stored_zeros is None else self.stored_zeros

    def dequantize_rows(self, rows: slice) -> Tensor:
        """Return rows of the divided matrix, float32: rows x groups across x elements."""
        groups = self.groups
        values = self.grid.table[groups.split(self.codes[rows]).int()]
        return (values - groups.spread(self.zeros, rows)) * groups.spread(self.scales, rows)

    def dequantize(self) -> Tensor:
        """Return the weight, float32, rows x columns."""
        values = torch.cat([self.dequantize_rows(rows) for rows in self.groups.chunks()])
        values = values.flatten(1)[:, : self.groups.shape[1]]
        rows, columns = self.groups.weight_shape
        if self.groups.is_flat:
            return values.reshape(-1)[: rows * columns].view(rows, columns)
        if self.groups.order is not None:
            values = values[:, self.groups.order.argsort()]
        return values
