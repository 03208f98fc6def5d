"""The part of a recorded tensor that this process runs: some rows of a batch, or a rank's shard."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from assay.hooks.row_positions import RowLayout
from assay.sites import LocalPart, RowMap


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


class RankLayout(Protocol):
    """The sharding of tensors over ranks by a trainer.

    All ranks that share a tensor call each method, in the same order. A tensor of the whole shape is
    whole.
    """

    def holds_part(self, module: str, port: str, local: Tensor, shape: tuple[int, ...]) -> bool:
        """Return True if `local` can be this rank's part of a tensor of `shape`."""
        ...

    def whole(self, parts: Sequence[LocalPart]) -> list[Tensor]:
        """Return the whole tensors, assembled from the parts of all ranks in one exchange."""
        ...

    def whole_gradient(
        self, module: str, port: str, local: Tensor, shape: tuple[int, ...]
    ) -> Tensor:
        """Return the gradient of the whole tensor, the sum over ranks that hold the same part."""
        ...

    def part(self, module: str, port: str, whole: Tensor) -> Tensor:
        """Return this rank's part of `whole`."""
        ...

    def part_of_gradient(self, module: str, port: str, whole: Tensor) -> Tensor:
        """Return this rank's share of a whole gradient, the sum of all shares."""
        ...


def layout_of(
    layout: RankLayout | None, module: str, port: str, local: Tensor, shape: tuple[int, ...]
) -> RankLayout | None:
    """Return `layout` if `local` is a part of a tensor of `shape`; None if it is whole, or neither."""
    if layout is None or tuple(local.shape) == shape:
        return None
    return layout if layout.holds_part(module, port, local, shape) else None


# Elements of whole tensors that wait for one exchange.
_EXCHANGED_ELEMENTS = 1 << 18


@dataclass(slots=True)
class PartQueue:
    """Exchanges the parts of many ports at once: a decode step has many, of few elements."""

    _waiting: list[tuple[LocalPart, Callable[[Tensor], None]]] = field(default_factory=list)
    _num_elements: int = 0

    def add(self, layout: RankLayout, part: LocalPart, measure: Callable[[Tensor], None]) -> None:
        """Call `measure` with the whole tensor, at the latest in `flush`.

        The part is copied. All ranks that share a tensor add the same parts in the same order.
        """
        self._waiting.append((part._replace(local=part.local.clone()), measure))
        self._num_elements += math.prod(part.shape)
        if self._num_elements >= _EXCHANGED_ELEMENTS:
            self.flush(layout)

    def flush(self, layout: RankLayout | None) -> None:
        """Assemble and measure all parts that wait."""
        waiting, self._waiting, self._num_elements = self._waiting, [], 0
        if layout is not None and waiting:
            wholes = layout.whole([part for part, _ in waiting])
            for whole, (_, measure) in zip(wholes, waiting, strict=True):
                measure(whole)
