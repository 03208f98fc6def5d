"""Groups of elements of a quantized weight that share one scale and zero point."""

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
