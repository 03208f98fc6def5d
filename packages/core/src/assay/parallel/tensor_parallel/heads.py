"""The query heads that each tensor-parallel rank computes, and the key/value heads it needs."""

import math
from dataclasses import dataclass

from assay.errors import UsageError


class HeadsError(UsageError):
    """Heads that cannot be distributed."""

    @classmethod
    def not_positive(cls, name: str, value: int) -> "HeadsError":
        """Make the error for a number called `name` below 1."""
        return cls(f"{name} is {value}; it must be at least 1")

    @classmethod
    def uneven_groups(cls, num_query_heads: int, num_kv_heads: int) -> "HeadsError":
        """Make the error for query heads that do not divide over key/value heads."""
        return cls(
            f"{num_query_heads} query heads cannot share {num_kv_heads} key/value heads evenly: "
            f"{num_query_heads} is no multiple of {num_kv_heads}"
        )

    @classmethod
    def uneven_ranks(cls, num_query_heads: int, num_ranks: int) -> "HeadsError":
        """Make the error for query heads that do not divide over ranks."""
        return cls(
            f"{num_query_heads} query heads cannot be distributed evenly over {num_ranks} "
            f"tensor-parallel ranks: {num_query_heads} is no multiple of {num_ranks}"
        )


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
    for name, value in (
        ("num_query_heads", num_query_heads),
        ("num_kv_heads", num_kv_heads),
        ("num_ranks", num_ranks),
    ):
        if value < 1:
            raise HeadsError.not_positive(name, value)
    if num_query_heads % num_kv_heads:
        raise HeadsError.uneven_groups(num_query_heads, num_kv_heads)
    if num_query_heads % num_ranks:
        raise HeadsError.uneven_ranks(num_query_heads, num_ranks)
    heads_of_rank = num_query_heads // num_ranks
    heads_of_kv = num_query_heads // num_kv_heads
    heads_of_slot = math.gcd(heads_of_rank, heads_of_kv)
    shares = []
    for rank in range(num_ranks):
        heads = range(rank * heads_of_rank, (rank + 1) * heads_of_rank)
        slots = tuple(head // heads_of_kv for head in heads[::heads_of_slot])
        shares.append(HeadShare(tuple(heads), slots))
    return tuple(shares)
