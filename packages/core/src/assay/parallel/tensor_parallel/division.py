"""The division of the features of a weight over the ranks of one mesh axis; pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from assay.errors import UsageError


def make_division_error(what: str, size: int, num_ranks: int, rank: int) -> UsageError:
    """Make the error for a rank without a feature of `what`."""
    return UsageError(
        f"{what}: {size} features over {num_ranks} tensor-parallel ranks leave none for rank {rank}"
    )


@dataclass(frozen=True, slots=True)
class Division:
    """The features of every rank, as ranges in the order in which the rank computes them."""

    size: int
    parts: tuple[tuple[range, ...], ...]

    @property
    def is_even(self) -> bool:
        """Return True if each rank computes exactly the features of its `Shard`."""
        return self.parts == divide_evenly(self.size, len(self.parts)).parts

    def features_of(self, rank: int) -> list[int]:
        """Return the features of `rank`, in its order."""
        return [*chain.from_iterable(self.parts[rank])]

    def copies(self) -> Counter[int]:
        """Count the ranks that compute each feature."""
        return Counter(
            chain.from_iterable(self.features_of(rank) for rank in range(len(self.parts)))
        )


def divide_evenly(size: int, num_ranks: int) -> Division:
    """Divide into consecutive chunks as `Shard` does; the last ones may be shorter or empty."""
    chunk = -(-size // num_ranks)
    return Division(
        size,
        tuple(
            (range(min(rank * chunk, size), min((rank + 1) * chunk, size)),)
            for rank in range(num_ranks)
        ),
    )


def divide_by_heads(
    num_heads: int, head_dim: int, heads_of_ranks: Sequence[Sequence[int]]
) -> Division:
    """Divide by heads of `head_dim` features; `heads_of_ranks` has the heads of every rank."""
    return Division(
        num_heads * head_dim,
        tuple(
            _merged(range(head * head_dim, (head + 1) * head_dim) for head in heads)
            for heads in heads_of_ranks
        ),
    )


def fuse(*divisions: Division) -> Division:
    """Combine the divisions of the parts of a fused weight."""
    offset = 0
    parts: list[tuple[range, ...]] = [()] * len(divisions[0].parts)
    for division in divisions:
        for rank, ranges in enumerate(division.parts):
            parts[rank] += tuple(range(r.start + offset, r.stop + offset) for r in ranges)
        offset += division.size
    return Division(offset, tuple(_merged(ranges) for ranges in parts))


def _merged(ranges: Iterable[range]) -> tuple[range, ...]:
    """Merge adjacent ranges, in order."""
    merged: list[range] = []
    for following in ranges:
        if merged and merged[-1].stop == following.start:
            merged[-1] = range(merged[-1].start, following.stop)
        else:
            merged.append(following)
    return tuple(merged)


def check_every_rank_has_some(what: str, division: Division) -> None:
    """Raise UsageError if a rank would have no feature of `what`."""
    for rank in range(len(division.parts)):
        if not division.features_of(rank):
            raise make_division_error(what, division.size, len(division.parts), rank)
