"""Tensors that several ranks hold: replicated, as shards along one dim, or as partial sums."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Shape = tuple[int, ...]
Kind = Literal["whole", "replicated", "sharded", "partial"]

# Replicas differ by rounding; shards and partial sums of one tensor differ by its own size.
_LARGEST_REPLICA_DIFFERENCE = 0.2


@dataclass(frozen=True, slots=True)
class Placement:
    """Distribution of a tensor over ranks. dim and sizes: of shards, in the order of the ranks."""

    kind: Kind
    dim: int = 0
    sizes: Shape = ()

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


def find_placements(
    expected: Sequence[Tensor], actual: Sequence[Tensor]
) -> tuple[Placement, Placement] | None:
    """Infer how the two sides spread one tensor over their ranks.

    The number of rows (dims 0 and 1) may differ: another batch size is not a shard.
    Returns: None if no pair of placements fits.
    """
    known = _find_whole(expected), _find_whole(actual)
    shapes = [tuple(one.shape) for one in expected], [tuple(one.shape) for one in actual]
    if known[0] is not None and known[1] is not None:
        return known[0], known[1]
    if known[0] is not None:
        other = _find_parts(shapes[1], shapes[0][0])
        return (known[0], other) if other else None
    if known[1] is not None:
        other = _find_parts(shapes[0], shapes[1][0])
        return (other, known[1]) if other else None
    return _find_both(*shapes)


def _find_whole(parts: Sequence[Tensor]) -> Placement | None:
    if len(parts) == 1:
        return Placement("whole")
    same = len({part.shape for part in parts}) == 1
    return Placement("replicated") if same and _are_replicas(parts) else None


def _find_parts(shapes: Sequence[Shape], whole: Shape) -> Placement | None:
    """Return the placement of parts of a tensor of shape `whole`."""
    if any(len(shape) != len(whole) for shape in shapes):
        return None
    # Channels first: of a square tensor, they are what is divided.
    for dim in reversed(range(len(whole))):
        sizes = tuple(shape[dim] for shape in shapes)
        others = (_without_rows(shape, dim) for shape in shapes)
        if sum(sizes) == whole[dim] and all(one == _without_rows(whole, dim) for one in others):
            return Placement("sharded", dim, sizes)
    same = all(_without_rows(shape, -1) == _without_rows(whole, -1) for shape in shapes)
    return Placement("partial") if same else None


def _find_both(
    expected: Sequence[Shape], actual: Sequence[Shape]
) -> tuple[Placement, Placement] | None:
    """Return the placements of two sides that both hold parts."""
    for whole in (actual[0], expected[0]):
        # One side holds summands, which have the shape of the whole.
        found = _find_parts(expected, whole), _find_parts(actual, whole)
        if found[0] and found[1] and "sharded" in (found[0].kind, found[1].kind):
            return found[0], found[1]
    one, other = expected[0], actual[0]
    for dim in reversed(range(len(one) if len(one) == len(other) else 0)):
        totals = sum(shape[dim] for shape in expected), sum(shape[dim] for shape in actual)
        is_same_rest = _without_rows(one, dim) == _without_rows(other, dim)
        if totals[0] == totals[1] and is_same_rest:
            sizes = [tuple(shape[dim] for shape in side) for side in (expected, actual)]
            return Placement("sharded", dim, sizes[0]), Placement("sharded", dim, sizes[1])
    same = _without_rows(one, -1) == _without_rows(other, -1)
    return (Placement("partial"), Placement("partial")) if same else None


def _without_rows(shape: Shape, dim: int) -> Shape:
    """Return a shape without `dim` and without the dims of rows, unless it has no others."""
    return tuple(
        size for at, size in enumerate(shape) if at != dim and at >= min(2, len(shape) - 1)
    )


def _are_replicas(parts: Sequence[Tensor]) -> bool:
    first = parts[0].double()
    size = float(torch.linalg.vector_norm(first))
    return all(
        float(torch.linalg.vector_norm(part.double() - first)) <= _LARGEST_REPLICA_DIFFERENCE * size
        for part in parts[1:]
    )
