"""The place of the running batch in a trace."""

from dataclasses import dataclass

import torch
from torch import Tensor

from assay.hooks.row_positions import RowLayout
from assay.sites import RowMap


@dataclass(frozen=True, slots=True)
class BatchSource:
    """The place of the running batch in a trace."""

    batch: int
    """Number of the batch in the trace."""
    row: int | None = None
    """The only row of it that runs; None for all."""

    def select_rows(self, rows: RowMap | None) -> RowMap | None:
        """Return the row map of the running rows."""
        if self.row is None or rows is None:
            return rows
        return RowMap((rows.prompts[self.row],), (rows.positions[self.row],))

    def select(self, tensor: Tensor, rows: RowMap | None) -> Tensor:
        """Return the part of a recorded tensor that belongs to the running rows."""
        if self.row is None or rows is None:
            return tensor
        layout = RowLayout.of_shape(tensor.shape, rows)
        if layout.batch_dim is None:
            return tensor
        size = rows.length if layout.flattened else 1
        return tensor[self.row * size : (self.row + 1) * size]

    def selected_shape(self, shape: tuple[int, ...], rows: RowMap | None) -> tuple[int, ...]:
        """Return the shape of the result of `select`."""
        return tuple(self.select(torch.empty(shape, device="meta"), rows).shape)
