"""One quantized weight: its codes, the groups that share a scale and zero point, and its values."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

_CHUNK_ELEMENTS = 1 << 20  # 4 MB of float32, to limit the memory of a comparison


@dataclass(frozen=True)
class Groups:
    """The division of a weight into blocks of equal size; the last ones may be smaller.

    In a flat format blocks run through all rows. Its weight becomes a matrix with one block per row.
    """

    weight_shape: tuple[int, int]
    """Rows (outputs) and columns (inputs) of the weight."""
    block: tuple[int, int]
    """Rows and columns of a block."""
    is_flat: bool = False
    order: Tensor | None = None
    """Columns in the order of their groups, if the groups are not contiguous (`g_idx`)."""

    def __post_init__(self) -> None:
        """Limit blocks to the size of the weight, so that padding takes no memory."""
        if not self.is_flat:
            rows, columns = (
                max(1, min(sizes)) for sizes in zip(self.block, self.weight_shape, strict=True)
            )
            object.__setattr__(self, "block", (rows, columns))

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Return rows and columns of the divided matrix."""
        if self.is_flat:
            return -(-self.weight_shape[0] * self.weight_shape[1] // self.block[1]), self.block[1]
        return self.weight_shape

    @cached_property
    def grid_shape(self) -> tuple[int, int]:
        """Count the groups, down and across."""
        return -(-self.shape[0] // self.block[0]), -(-self.shape[1] // self.block[1])

    @cached_property
    def num_groups(self) -> int:
        """Count the groups. Group numbers run across, then down."""
        return self.grid_shape[0] * self.grid_shape[1]

    def chunks(self) -> Iterator[slice]:
        """Divide the rows into parts that hold whole blocks or lie within one."""
        fitting = max(1, _CHUNK_ELEMENTS // max(1, self.shape[1]))
        outer = max(self.block[0], fitting - fitting % self.block[0])
        for first in range(0, self.shape[0], outer):
            last = min(first + outer, self.shape[0])
            inner = min(outer, fitting)
            for start in range(first, last, inner):
                yield slice(start, min(start + inner, last))

    def select(self, weight: Tensor, rows: slice) -> Tensor:
        """Return rows of the divided matrix as float32: rows x groups across x elements."""
        if not self.is_flat:
            part = weight[rows].float()
            return self.split(part if self.order is None else part[:, self.order])
        width = self.shape[1]
        part = weight.reshape(-1)[rows.start * width : rows.stop * width].float()
        missing = (rows.stop - rows.start) * width - len(part)
        return self.split(pad(part, (0, missing)).view(-1, width))

    def split(self, matrix: Tensor) -> Tensor:
        """Divide rows of the matrix into groups across; pad the last one with zeros."""
        missing = self.grid_shape[1] * self.block[1] - self.shape[1]
        padded = pad(matrix, (0, missing)) if missing else matrix
        return padded.view(len(matrix), self.grid_shape[1], self.block[1])

    def clear_filling(self, values: Tensor, rows: slice) -> Tensor:
        """Set the padding of `select` to zero in place."""
        num_elements = self.weight_shape[0] * self.weight_shape[1]
        if self.is_flat and rows.stop * self.shape[1] > num_elements:
            values.view(-1)[num_elements - rows.start * self.shape[1] :] = 0
        rest = self.shape[1] % self.block[1]
        if rest:
            values[:, -1, rest:] = 0
        return values

    def spread(self, per_group: Tensor, rows: slice) -> Tensor:
        """Return the values of the groups of `rows`: rows x groups across x 1."""
        return per_group.view(self.grid_shape)[self._down(rows)].unsqueeze(-1)

    def add(self, values: Tensor, rows: slice, into: Tensor) -> None:
        """Add the elements of `rows` to the sums of their groups."""
        into.view(self.grid_shape).index_add_(0, self._down(rows), values.sum(-1).to(into.dtype))

    def _down(self, rows: slice) -> Tensor:
        return torch.arange(rows.start, rows.stop) // self.block[0]

    def find_range(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the lowest and highest value of each group, or zero if that is lower or higher."""
        low, high = torch.zeros(2, *self.grid_shape)
        for rows in self.chunks():
            lowest, highest = self.select(weight, rows).aminmax(dim=-1)
            numbers = self._down(rows).unsqueeze(1).expand_as(lowest)
            low.scatter_reduce_(0, numbers, lowest, "amin")
            high.scatter_reduce_(0, numbers, highest, "amax")
        return low.flatten(), high.flatten()

    def stack(self, weight: Tensor, rows: slice) -> tuple[int, Tensor]:
        """Return the number of the first group of `rows`, and each group's elements as one row.

        `rows` must start at the edge of a block.
        """
        values = self.select(weight, rows)
        down = -(-len(values) // self.block[0])
        blocks = pad(values, (0, 0, 0, 0, 0, down * self.block[0] - len(values)))
        blocks = blocks.view(down, self.block[0], *values.shape[1:]).transpose(1, 2)
        return rows.start // self.block[0] * self.grid_shape[1], blocks.flatten(2).flatten(0, 1)

    def rows_of(self, group: int) -> slice:
        """Return the rows of the divided matrix that hold a group."""
        down = group // self.grid_shape[1]
        return slice(down * self.block[0], min((down + 1) * self.block[0], self.shape[0]))

    def place(self, group: int) -> tuple[slice, list[int]]:
        """Return the rows and columns of the weight that a group covers.

        A flat block may cover the end of one row and the start of the next; all its columns are returned.
        """
        rows, across = self.rows_of(group), group % self.grid_shape[1]
        num_columns = self.weight_shape[1]
        if self.is_flat:
            start = group * self.block[1]
            stop = min(start + self.block[1], self.weight_shape[0] * num_columns)
            columns = sorted({index % num_columns for index in range(start, stop)})
            return slice(start // num_columns, (stop - 1) // num_columns + 1), columns
        stop = min((across + 1) * self.block[1], num_columns)
        columns = list(range(across * self.block[1], stop))
        if self.order is not None:
            columns = sorted(int(self.order[index]) for index in columns)
        return rows, columns


# Source: Dettmers et al., QLoRA, appendix E.
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip

# Source: bitsandbytes 0.50, `functional.get_4bit_type`: 1 sign bit, 2 exponent bits, 1 mantissa bit.
_FP4 = (-12.0, -8.0, -6.0, -4.0, -3.0, -2.0, -0.0625, 0.0, 0.0625, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)


# Source: OCP Microscaling Formats 1.0, 5.3.3: 1 sign bit, 2 exponent bits, 1 mantissa bit.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


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
    def of_e2m1() -> "Grid":
        """Return the grid of the 4-bit float of MXFP4 and NVFP4."""
        table = torch.tensor([*_E2M1, *(-one for one in _E2M1)])
        return Grid(table, table.unique())

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
class InputRounding:
    """The rounding of a linear layer's input before a product of codes, with scales computed from the input."""

    grid: Grid
    group: int | None = None
    """Columns that share a scale; None for a row, 0 for the whole input."""
    largest_rounded: float = torch.inf
    """Columns with a larger value keep their values."""
    scale_dtype: torch.dtype | None = None
    """Dtype of 8 bits of the scales, which another scale of the whole input brings into its range."""

    @property
    def error_of_one(self) -> float:
        """Return the error of the largest value of a group, relative to it."""
        of_scale = float(torch.finfo(self.scale_dtype).eps) / 2 if self.scale_dtype else 0.0
        return of_scale + 1 - float(self.grid.levels[-1]) / self._middle

    @property
    def _middle(self) -> float:
        """Return the code of the largest value: 127.5 for -128 to 127 (torchao 0.18, compressed-tensors 0.20)."""
        return float(self.grid.levels[-1] - self.grid.levels[0]) / 2

    def apply(self, value: Tensor) -> Tensor:
        """Round an input, [..., columns]."""
        wide = value.float()
        if self.group == 0:
            parts, largest = wide.unsqueeze(-2), wide.abs().amax()
        else:
            parts = wide.unflatten(-1, (-1, self.group or wide.shape[-1]))
            largest = parts.abs().amax(-1, keepdim=True)
        scale = (largest / self._middle).clamp(min=torch.finfo(torch.float32).tiny)
        if self.scale_dtype is not None:
            outer = torch.finfo(self.scale_dtype).max / scale.amax()
            scale = (scale * outer).to(self.scale_dtype).float() / outer
            scale = scale.clamp(min=torch.finfo(torch.float32).tiny)
        scale = scale.to(value.dtype).float()
        rounded = (self.grid.round((parts / scale).cpu()).to(scale) * scale).flatten(-2)
        kept = wide.flatten(0, -2).abs().amax(0) > self.largest_rounded
        return torch.where(kept, wide, rounded).to(value.dtype)


@dataclass(frozen=True)
class QuantizedWeight:
    """Codes, scales and zero points. An element is (grid value of its code - zero point) x scale."""

    codes: Tensor
    """uint8, in the shape and column order of `groups`."""
    grid: Grid
    groups: Groups
    scales: Tensor
    """One per group, float32."""
    scale_precision: float | Tensor
    """Relative rounding error of the stored scales, of all or one per group."""
    stored_zeros: Tensor | None = None
    """Zero points in grid values, one per group, float32; None if all are `middle`."""
    middle: float = 0.0

    @cached_property
    def zeros(self) -> Tensor:
        """Return the zero points, one per group."""
        constant = torch.full((self.groups.num_groups,), self.middle)
        return constant if self.stored_zeros is None else self.stored_zeros

    @cached_property
    def scale_precisions(self) -> Tensor:
        """Return the relative rounding error of each stored scale, float64."""
        return torch.as_tensor(self.scale_precision).double().expand(self.groups.num_groups)

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
