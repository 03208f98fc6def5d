"""The parts of a tensor that ranks hold, and the tensor that they make up."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Shape = tuple[int, ...]
# By divided dim, counted from the end, the ranges of the indices that a rank holds.
Ranges = tuple[tuple[int, tuple[range, ...]], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a tensor that one rank holds. Pieces with equal ranges and another summand add up."""

    ranges: Ranges = ()
    summand: int = 0

    def cut(self, whole: Tensor) -> Tensor:
        """Return this part of a whole tensor."""
        for dim, ranges in self.ranges:
            whole = torch.cat([whole.narrow(dim, one.start, len(one)) for one in ranges], dim)
        return whole


@dataclass(frozen=True, slots=True)
class Placement:
    """Distribution of a tensor over the ranks that hold it. shape: that of the whole tensor."""

    pieces: tuple[Piece, ...]
    shape: Shape

    @property
    def is_whole(self) -> bool:
        """Return True if every holder has the whole tensor."""
        return all(piece == Piece() for piece in self.pieces)

    @property
    def has_summands(self) -> bool:
        """Return True if values of several holders have to be added."""
        return any(piece.summand for piece in self.pieces)

    @property
    def parts(self) -> list[tuple[int, ...]]:
        """Return the holders of each part: one, or those whose summands add up to it."""
        found: dict[Ranges, dict[int, list[int]]] = {}
        for holder, piece in enumerate(self.pieces):
            found.setdefault(piece.ranges, {}).setdefault(piece.summand, []).append(holder)
        return sorted(
            part for summands in found.values() for part in zip(*summands.values(), strict=False)
        )

    @property
    def replicas(self) -> list[tuple[int, int]]:
        """Return the holders of what another one holds too, and the first such holder."""
        first: dict[Piece, int] = {}
        return [
            (holder, first[piece])
            for holder, piece in enumerate(self.pieces)
            if first.setdefault(piece, holder) != holder
        ]

    def part(self, whole: Tensor, holders: Sequence[int]) -> Tensor:
        """Return what a part must be."""
        return self.pieces[holders[0]].cut(whole)

    def fits(self, whole: Tensor) -> bool:
        """Return True if the divided dims of `whole` have the size that this placement divides."""
        return all(
            -dim <= whole.ndim and whole.shape[dim] == self.shape[dim]
            for piece in self.pieces
            for dim, _ in piece.ranges
        )

    def assemble(self, values: Sequence[Tensor]) -> Tensor:
        """Return the whole tensor, from the first of equal parts."""
        found: dict[Ranges, Tensor] = {}
        for holders in self.parts:
            ranges = self.pieces[holders[0]].ranges
            if ranges not in found:
                found[ranges] = add([values[holder] for holder in holders])
        while () not in found:
            found = _join_last_dim(found)
        return found[()]


def add(summands: Sequence[Tensor]) -> Tensor:
    """Return the sum, added in float64, in the dtype of the summands."""
    if len(summands) == 1:
        return summands[0]
    return torch.stack([one.double() for one in summands]).sum(0).to(summands[0].dtype)


def _join_last_dim(parts: dict[Ranges, Tensor]) -> dict[Ranges, Tensor]:
    """Join the parts that differ only in their last divided dim."""
    chunks: dict[Ranges, list[tuple[int, Tensor]]] = {}
    dims: dict[Ranges, int] = {}
    for ranges, value in parts.items():
        *outer, (dim, own) = ranges
        start = 0
        for one in own:
            chunk = value.narrow(dim, start, len(one))
            chunks.setdefault(tuple(outer), []).append((one.start, chunk))
            start += len(one)
        dims[tuple(outer)] = dim
    return {
        outer: torch.cat(
            [chunk for _, chunk in sorted(of_dim, key=lambda one: one[0])], dims[outer]
        )
        for outer, of_dim in chunks.items()
    }
