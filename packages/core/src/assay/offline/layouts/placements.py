"""The parts of a tensor that ranks hold, and their assembly."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Shape = tuple[int, ...]
# The index ranges that a rank holds, by divided dim (counted from the end).
Ranges = tuple[tuple[int, tuple[range, ...]], ...]


@dataclass(frozen=True, slots=True)
class LocalSlice:
    """The part of a tensor that one rank holds. Slices with equal ranges and other summands add up."""

    ranges: Ranges = ()
    summand: int = 0

    def cut(self, whole: Tensor) -> Tensor:
        """Cut this part out of a whole tensor."""
        for dim, ranges in self.ranges:
            whole = torch.cat([whole.narrow(dim, one.start, len(one)) for one in ranges], dim)
        return whole


@dataclass(frozen=True, slots=True)
class Placement:
    """The distribution of a tensor over ranks."""

    slices: tuple[LocalSlice, ...]
    shape: Shape
    """Shape of the whole tensor."""

    @property
    def is_whole(self) -> bool:
        """Return True if every holder has the whole tensor."""
        return all(one_slice == LocalSlice() for one_slice in self.slices)

    @property
    def parts(self) -> list[tuple[int, ...]]:
        """Return the holders of each part: one rank, or the ranks whose summands add up to it."""
        found: dict[Ranges, dict[int, list[int]]] = {}
        for holder, one_slice in enumerate(self.slices):
            found.setdefault(one_slice.ranges, {}).setdefault(one_slice.summand, []).append(holder)
        return sorted(
            part for summands in found.values() for part in zip(*summands.values(), strict=False)
        )

    @property
    def replicas(self) -> list[tuple[int, int]]:
        """Return each holder of a copy, with the first holder of the same values."""
        first: dict[LocalSlice, int] = {}
        return [
            (holder, first[one_slice])
            for holder, one_slice in enumerate(self.slices)
            if first.setdefault(one_slice, holder) != holder
        ]

    def fits(self, whole: Tensor) -> bool:
        """Return True if this placement divides dims of the size that `whole` has."""
        return all(
            -dim <= whole.ndim and whole.shape[dim] == self.shape[dim]
            for one_slice in self.slices
            for dim, _ in one_slice.ranges
        )

    def assemble(self, values: Sequence[Tensor]) -> Tensor:
        """Assemble the whole tensor. Of replicas, the first one counts."""
        found: dict[Ranges, Tensor] = {}
        for holders in self.parts:
            ranges = self.slices[holders[0]].ranges
            if ranges not in found:
                found[ranges] = add([values[holder] for holder in holders])
        while () not in found:
            found = _join_last_dim(found)
        return found[()]


def add(summands: Sequence[Tensor]) -> Tensor:
    """Add in float64. Returns: the sum, in the dtype of the summands."""
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
