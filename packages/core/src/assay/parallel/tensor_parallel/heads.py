"""Which attention heads each tensor-parallel rank computes, and which key/value heads it needs."""

import math
from dataclasses import dataclass

from assay.errors import UsageError


class HeadsError(UsageError):
    """Heads that cannot be distributed."""

    @classmethod
    def not_positive(cls, name: str, value: int) -> "HeadsError":
        """`name`: of a number that is below 1."""
        return cls(f"{name} is {value}; it must be at least 1")

    @classmethod
    def uneven_groups(cls, num_query_heads: int, num_kv_heads: int) -> "HeadsError":
        """The number of query heads is no multiple of that of key/value heads."""
        return cls(
            f"{num_query_heads} query heads cannot share {num_kv_heads} key/value heads evenly: "
            f"{num_query_heads} is no multiple of {num_kv_heads}"
        )

    @classmethod
    def uneven_ranks(cls, num_query_heads: int, num_ranks: int) -> "HeadsError":
        """The number of query heads is no multiple of that of ranks."""
        return cls(
            f"{num_query_heads} query heads cannot be distributed evenly over {num_ranks} "
            f"tensor-parallel ranks: {num_query_heads} is no multiple of {num_ranks}"
        )


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The heads of one rank.

    query_heads: the query heads that it computes, in order.
    kv_heads: the key/value head in each of its slots; slot i serves its query heads
        i * group_size to (i + 1) * group_size. A head may be in slots of several ranks, and in
        several slots of one.
    """

    query_heads: tuple[int, ...]
    kv_heads: tuple[int, ...]

    @property
    def group_size(self) -> int:
        """Consecutive query heads that use one slot."""
        return len(self.query_heads) // len(self.kv_heads)


def share_heads(num_query_heads: int, num_kv_heads: int, num_ranks: int) -> tuple[HeadShare, ...]:
    """The heads of every rank, equally many on each.

    Query heads are dealt out in order. The number of query heads of a slot divides both the number
    of a rank's heads and that of one key/value head, so that no slot needs two key/value heads.
    Where num_ranks divides num_kv_heads, every key/value head is on one rank; where there are more
    ranks than key/value heads, each is on several.

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
