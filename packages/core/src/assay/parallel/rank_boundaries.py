"""The division of heads and features over ranks, a rank's parts at module boundaries, and their conversion."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from assay.errors import UsageError
from assay.sites import LocalPart, holds_heads, unwrapped_path


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
            f"{num_query_heads} is not a multiple of {num_kv_heads}"
        )
    if num_query_heads % num_ranks:
        raise HeadsError(
            f"{num_query_heads} query heads cannot be distributed evenly over {num_ranks} "
            f"tensor-parallel ranks: {num_query_heads} is not a multiple of {num_ranks}"
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


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """This rank's features of a whole tensor."""

    index: Tensor
    """Index of each local feature in the whole tensor, shape (local,)."""
    copies: Tensor
    """Number of copies of each over all ranks, shape (local,). The gradients of all copies of a feature
    add up to its gradient."""
    dim: int = -1
    """The dim of the features, counted from the end: -1, or -2 for heads."""

    @classmethod
    def of(cls, division: Division, rank: int, dim: int = -1) -> "Features":
        """Return the features of `rank` in `division`."""
        index = division.features_of(rank)
        copies = division.copies()
        return cls(torch.tensor(index), torch.tensor([copies[feature] for feature in index]), dim)

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole value."""
        return whole.index_select(self.dim, self.index.to(whole.device))

    def cut_gradient(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole gradient, divided by the copies of each feature."""
        return self.divide_by_copies(self.cut(whole))

    def spread(self, local: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor of `shape` with this rank's part in its place, and zeros elsewhere."""
        total = local.new_zeros(shape)
        return total.index_add_(total.ndim + self.dim, self.index.to(local.device), local)

    def divide_by_copies(self, local: Tensor) -> Tensor:
        """Divide each feature of this rank by the number of its copies."""
        shape = [1] * local.ndim
        shape[self.dim] = -1
        return local / self.copies.to(local.device).view(shape)


@dataclass(frozen=True, slots=True, eq=False)
class TensorLayout:
    """This rank's features at module boundaries; modules without an entry have whole tensors."""

    heads: HeadShare
    """The attention probabilities, second output of an attention module, have its query heads."""
    input_features: dict[str, Features] = field(default_factory=dict)
    """Features of the first input, by module path."""
    output_features: dict[str, Features] = field(default_factory=dict)
    """Features of the (first) output, by module path."""


class RankBoundaries:
    """The RankLayout of a tensor-parallel group."""

    def __init__(self, layout: TensorLayout, group: dist.ProcessGroup) -> None:
        self._group = group
        heads = torch.tensor(layout.heads.query_heads)
        self._probabilities = Features(heads, torch.ones_like(heads), dim=-3)
        self._cache = _cached_heads(layout, group)
        self._inputs = {unwrapped_path(path): f for path, f in layout.input_features.items()}
        self._outputs = {unwrapped_path(path): f for path, f in layout.output_features.items()}

    def holds_part(self, module: str, port: str, local: Tensor, shape: tuple[int, ...]) -> bool:
        """Return True if the rank's features explain the difference in shape."""
        features = self._features(module, port) if local.is_floating_point() else None
        if features is None or local.ndim != len(shape) or local.ndim < -features.dim:
            return False
        expected = list(shape)
        expected[features.dim] = len(features.index)
        return list(local.shape) == expected

    def whole(self, parts: Sequence[LocalPart]) -> list[Tensor]:
        """Gather all ranks' features; copies are averaged."""
        spread = []
        for module, port, local, shape in parts:
            features = self._known(module, port)
            spread.append(features.spread(features.divide_by_copies(local.double()), shape))
        totals = torch.cat([tensor.flatten() for tensor in spread])
        dist.all_reduce(totals, group=self._group)
        wholes = totals.split([math.prod(part.shape) for part in parts])
        return [
            whole.view(part.shape).to(part.local.dtype)
            for whole, part in zip(wholes, parts, strict=True)
        ]

    def whole_gradient(
        self, module: str, port: str, local: Tensor, shape: tuple[int, ...]
    ) -> Tensor:
        """Gather all ranks' features; copies are summed."""
        total = self._known(module, port).spread(local.double(), shape)
        dist.all_reduce(total, group=self._group)
        return total

    def part(self, module: str, port: str, whole: Tensor) -> Tensor:
        """Return this rank's features."""
        return self._known(module, port).cut(whole)

    def part_of_gradient(self, module: str, port: str, whole: Tensor) -> Tensor:
        """Return this rank's features, divided by their copies."""
        return self._known(module, port).cut_gradient(whole)

    def _features(self, module: str, port: str) -> Features | None:
        if port.startswith("input."):
            return self._inputs.get(module)
        if module.endswith(".self_attn"):
            if port == "output.1":
                return self._probabilities
            if holds_heads(port):
                return self._cache
        return self._outputs.get(module)

    def _known(self, module: str, port: str) -> Features:
        features = self._features(module, port)
        if features is None:
            raise LookupError(f"{module}:{port} is not divided")
        return features


def _cached_heads(layout: TensorLayout, group: dist.ProcessGroup) -> Features:
    """Return the features of cached keys and values, (B, heads, T, head_dim)."""
    of_ranks: list[tuple[int, ...]] = [()] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, layout.heads.kv_heads, group)
    slots = [head for of_rank in of_ranks for head in of_rank]
    heads = layout.heads.kv_heads
    copies = torch.tensor([slots.count(head) for head in heads])
    return Features(torch.tensor(heads), copies, dim=-3)
