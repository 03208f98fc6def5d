"""Where in a trace the batch that runs is found."""

from dataclasses import dataclass

from torch import Tensor

from assay.hooks.row_positions import RowLayout
from assay.sites import RowMap


@dataclass(frozen=True, slots=True)
class BatchSource:
    """Where in the trace the running batch is found.

    batch: number of the trace's batch; row: the only row of it that is run, None for all.
    """

    batch: int
    row: int | None = None

    def select_rows(self, rows: RowMap | None) -> RowMap | None:
        """The row map of what is run."""
        if self.row is None or rows is None:
            return rows
        return RowMap((rows.prompts[self.row],), (rows.positions[self.row],))

    def select(self, tensor: Tensor, rows: RowMap | None) -> Tensor:
        """The part of a recorded tensor that belongs to what is run."""
        if self.row is None or rows is None:
            return tensor
        layout = RowLayout.of_shape(tensor.shape, rows)
        if layout.batch_dim is None:
            return tensor
        size = rows.length if layout.flattened else 1
        return tensor[self.row * size : (self.row + 1) * size]

    def selected_shape(self, shape: tuple[int, ...], rows: RowMap | None) -> tuple[int, ...]:
        """The shape of what `select` returns."""
        if self.row is None or rows is None:
            return shape
        layout = RowLayout.of_shape(shape, rows)
        if layout.batch_dim is None:
            return shape
        return (rows.length if layout.flattened else 1, *shape[1:])
