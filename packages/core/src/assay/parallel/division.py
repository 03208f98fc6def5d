"""The division of heads, and of the features of a weight, over the ranks of one mesh axis; pure."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from assay.errors import UsageError


class HeadsError(UsageError):
    """Heads that cannot be distributed."""


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The heads of one rank."""

    query_heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    """The key/value head in each slot; slot i serves the query heads i * group_size to
    (i + 1) * group_size. A head may be in several slots, also of several ranks."""

    @property
    def group_size(self) -> int:
        """Return the number of consecutive query heads that use one slot."""
        return len(self.query_heads) // len(self.kv_heads)


def share_heads(num_query_heads: int, num_kv_heads: int, num_ranks: int) -> tuple[HeadShare, ...]:
    """Assign equally many query heads, in order, to every rank.

    The query heads of a slot divide both those of a rank and those of a key/value head, so that no
    slot needs two key/value heads. If num_ranks divides num_kv_heads, every key/value head is on one
    rank; with more ranks than key/value heads, each is on several.

    Raises: HeadsError for numbers that do not divide.
    """
    numbers = {
        "num_query_heads": num_query_heads, "num_kv_heads": num_kv_heads, "num_ranks": num_ranks,
    }  # fmt: skip
    for name, value in numbers.items():
        if value < 1:
            raise HeadsError(f"{name} is {value}; it must be at least 1")
    if num_query_heads % num_kv_heads:
        raise HeadsError(
            f"{num_query_heads} query heads cannot share {num_kv_heads} key/value heads evenly: "
            f"{num_query_heads} is no multiple of {num_kv_heads}"
        )
    if num_query_heads % num_ranks:
        raise HeadsError(
            f"{num_query_heads} query heads cannot be distributed evenly over {num_ranks} "
            f"tensor-parallel ranks: {num_query_heads} is no multiple of {num_ranks}"
        )
    heads_of_rank = num_query_heads // num_ranks
    heads_of_kv = num_query_heads // num_kv_heads
    heads_of_slot = math.gcd(heads_of_rank, heads_of_kv)
    shares = []
    for rank in range(num_ranks):
        heads = range(rank * heads_of_rank, (rank + 1) * heads_of_rank)
        slots = tuple(head // heads_of_kv for head in heads[::heads_of_slot])
        shares.append(HeadShare(tuple(heads), slots))
    return tuple(shares)


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
            raise UsageError(
                f"{what}: {division.size} features over {len(division.parts)} tensor-parallel ranks"
                f" leave none for rank {rank}"
            )
