"""Tensors that several ranks hold: replicated, as shards along one dim, or as partial sums."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["whole", "replicated", "sharded", "partial"]

# Replicas differ by rounding; shards and partial sums of one tensor differ by its own size.
_LARGEST_REPLICA_DIFFERENCE = 0.2


@dataclass(frozen=True, slots=True)
class Placement:
    """How a tensor is spread over ranks. dim and sizes: of shards, in the order of the ranks."""

    kind: Kind
    dim: int = 0
    sizes: tuple[int, ...] = ()

    def part(self, whole: Tensor, number: int) -> Tensor:
        """Return what the rank with this number among the holders must have."""
        if self.kind != "sharded":
            return whole
        return whole.narrow(self.dim, sum(self.sizes[:number]), self.sizes[number])

    def assemble(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole tensor."""
        if self.kind == "sharded":
            return torch.cat(list(parts), dim=self.dim)
        if self.kind == "partial":
            return torch.stack([part.double() for part in parts]).sum(0).to(parts[0].dtype)
        return parts[0]


def find_placement(parts: Sequence[Tensor], whole: tuple[int, ...] | None) -> Placement | None:
    """Infer the placement of a tensor from its parts.

    whole: the shape of the whole tensor, from the other side; None if that is not known either.
    Returns: None if no placement fits.
    """
    if len(parts) == 1:
        return Placement("whole")
    shapes = [tuple(part.shape) for part in parts]
    if len({len(shape) for shape in shapes}) > 1:
        return None
    same = len(set(shapes)) == 1
    if same and _are_replicas(parts):
        return Placement("replicated")
    if same and whole in (None, shapes[0]):
        return Placement("partial")
    dims = [
        dim
        for dim in range(len(shapes[0]))
        if _fits(shapes, dim, whole) and (same or len({shape[dim] for shape in shapes}) > 1)
    ]
    if len(dims) != 1:
        return None
    return Placement("sharded", dims[0], tuple(shape[dims[0]] for shape in shapes))


def _fits(shapes: Sequence[tuple[int, ...]], dim: int, whole: tuple[int, ...] | None) -> bool:
    """Return True if shards along `dim` of these shapes make up the whole."""
    others = {shape[:dim] + shape[dim + 1 :] for shape in shapes}
    if len(others) > 1:
        return False
    if whole is None:
        return True
    total = sum(shape[dim] for shape in shapes)
    return (*shapes[0][:dim], total, *shapes[0][dim + 1 :]) == whole


def _are_replicas(parts: Sequence[Tensor]) -> bool:
    first = parts[0].double()
    size = float(torch.linalg.vector_norm(first))
    return all(
        float(torch.linalg.vector_norm(part.double() - first)) <= _LARGEST_REPLICA_DIFFERENCE * size
        for part in parts[1:]
    )
