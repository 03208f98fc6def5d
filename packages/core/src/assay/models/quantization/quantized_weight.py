"""One quantized weight: its codes, and the values that they represent."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from assay.models.quantization.groups import Groups

# Source: Dettmers et al., QLoRA, appendix E.
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip

# Source: bitsandbytes 0.50, `functional.get_4bit_type`: 1 sign bit, 2 exponent bits, 1 mantissa bit.
_FP4 = (-12.0, -8.0, -6.0, -4.0, -3.0, -2.0, -0.0625, 0.0, 0.0625, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)


@dataclass(frozen=True)
class Grid:
    """Values of the codes, in units of the scale."""

    table: Tensor
    """Value of each stored code."""
    levels: Tensor
    """The values of the format in ascending order, from which a quantizer chooses."""
    is_integer: bool = False
    """The levels are consecutive integers, which a zero point can shift."""

    @staticmethod
    def of_unsigned(num_bits: int) -> "Grid":
        """Return the grid of unsigned integers."""
        levels = torch.arange(1 << num_bits, dtype=torch.float32)
        return Grid(levels, levels, is_integer=True)

    @staticmethod
    def of_signed(low: int, high: int) -> "Grid":
        """Return the grid of the integers from `low` to `high`, stored as int8."""
        table = torch.arange(256).to(torch.uint8).view(torch.int8).float()
        return Grid(table, torch.arange(low, high + 1, dtype=torch.float32), is_integer=True)

    @staticmethod
    def of_dtype(dtype: torch.dtype) -> "Grid":
        """Return the grid of a floating-point dtype of 8 bits."""
        table = torch.arange(256).to(torch.uint8).view(dtype).float()
        return Grid(table, table[table.isfinite()].unique())

    @staticmethod
    def of_4bit(name: str, table: Tensor) -> "Grid":
        """Return the grid of bitsandbytes' `nf4` or `fp4` with the stored table of codes."""
        levels = torch.tensor(_NF4 if name == "nf4" else _FP4)
        return Grid(table.float(), levels / levels.max())

    @cached_property
    def widths(self) -> Tensor:
        """Return the width of the interval that is rounded to each level."""
        ends = self.levels.diff()[[0, -1]]
        return torch.cat([ends[:1], self._middles.diff(), ends[1:]])

    @cached_property
    def is_inner(self) -> Tensor:
        """Return True for each level except the lowest and the highest, to which values are clipped."""
        return (self.levels > self.levels[0]) & (self.levels < self.levels[-1])

    @cached_property
    def _middles(self) -> Tensor:
        return (self.levels[1:] + self.levels[:-1]) / 2

    def nearest(self, values: Tensor) -> Tensor:
        """Return the indices of the nearest levels."""
        return torch.bucketize(values, self._middles, out_int32=True)

    def round(self, values: Tensor) -> Tensor:
        """Round values to the nearest levels."""
        if self.is_integer:
            return values.round().clamp_(float(self.levels[0]), float(self.levels[-1]))
        return self.levels[self.nearest(values)]


@dataclass(frozen=True)
class QuantizedWeight:
    """Codes, scales and zero points. An element is (grid value of its code - zero point) x scale."""

    codes: Tensor
    """uint8, in the shape and column order of `groups`."""
    grid: Grid
    groups: Groups
    scales: Tensor
    """One per group, float32."""
    scale_precision: float
    """Relative rounding error of the stored scales."""
    stored_zeros: Tensor | None = None
    """Zero points in grid values, one per group, float32; None if all are `middle`."""
    middle: float = 0.0

    @cached_property
    def zeros(self) -> Tensor:
        """Return the zero points, one per group."""
        constant = torch.full((self.groups.num_groups,), self.middle)
        return constant if self.stored_zeros is None else self.stored_zeros

    def dequantize_rows(self, rows: slice) -> Tensor:
        """Return rows of the divided matrix as float32: rows x groups across x elements."""
        groups = self.groups
        values = self.grid.table[groups.split(self.codes[rows]).int()]
        return (values - groups.spread(self.zeros, rows)) * groups.spread(self.scales, rows)

    def dequantize(self) -> Tensor:
        """Return the weight as float32, rows x columns."""
        values = torch.cat([self.dequantize_rows(rows) for rows in self.groups.chunks()])
        values = values.flatten(1)[:, : self.groups.shape[1]]
        rows, columns = self.groups.weight_shape
        if self.groups.is_flat:
            return values.reshape(-1)[: rows * columns].view(rows, columns)
        if self.groups.order is not None:
            values = values[:, self.groups.order.argsort()]
        return values
