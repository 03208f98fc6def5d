"""Gathers values that are sharded over ranks, and shards them again.

For a DTensor every function is a collective: all ranks of its mesh call it in the same order.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(value: Tensor) -> Tensor:
    """Return the whole tensor on every rank."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def put(target: Tensor, value: Tensor) -> None:
    """Copy the whole `value` into `target`, or this rank's part of it."""
    with torch.no_grad():
        target.copy_(part_like(value, target))


def part_like(value: Tensor, like: Tensor) -> Tensor:
    """Return the whole `value` sharded like `like`, on its device and in its dtype."""
    value = value.to(device=like.device, dtype=like.dtype)
    if not isinstance(like, DTensor):
        return value
    # Every rank has the whole value, so nothing is sent.
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def moment_like(value: object, parameter: Tensor) -> object:
    """Copy a whole moment and shard it like its parameter; copy a counter."""
    if not isinstance(value, Tensor):
        return value
    return part_like(value, parameter.detach()).clone() if value.ndim else value.detach().clone()


def coordinates_of(value: Tensor) -> tuple[tuple[int, int], ...]:
    """Return number and this rank's place for each mesh axis that divides `value`."""
    if not isinstance(value, DTensor):
        return ()
    places = value.device_mesh.get_coordinate() or [0] * len(value.placements)
    return tuple(
        (axis, place)
        for axis, (place, placement) in enumerate(zip(places, value.placements, strict=True))
        if not placement.is_replicate()
    )


def local_part(value: Tensor) -> Tensor:
    """Return this rank's part of a value."""
    return value.to_local() if isinstance(value, DTensor) else value


class PartialSums:
    """Sums over ranks of gradients before their reduction."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    @property
    def num_ranks(self) -> int:
        """Number of parts of each sum."""
        return self._group.size()

    def total(self, value: Tensor) -> Tensor:
        """Return the sum over the ranks, in float64."""
        total = value.detach().to("cpu", torch.float64)
        dist.all_reduce(total, group=self._group)
        return total

    def products_by_owner(self, actual: Tensor, expected: Tensor) -> Tensor:
        """Return sums of actual * expected and expected**2 by owning rank, (2, ranks).

        A rank owns the elements that `share` returns to it whole.
        """
        products = torch.stack([actual * expected, expected * expected]).flatten(1)
        turn = torch.arange(products.shape[1], device=products.device) % (2 * self.num_ranks)
        sums = products.new_zeros(2, 2 * self.num_ranks).index_add_(1, turn, products)
        return sums[:, : self.num_ranks]

    def share(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        """Return this rank's part of a sum that is exact in `dtype`.

        By turns, one rank has all of an element, or it and the next rank have half each. This shows a
        reduction that takes a single part, the largest part, or a mean of some parts.
        """
        size, rank = self._group.size(), self._group.rank()
        number = torch.arange(total.numel(), device=total.device).reshape(total.shape) % (2 * size)
        half = total / 2
        divided = (number >= size) & (half.abs() >= torch.finfo(dtype).tiny)
        first = number % size
        own = torch.where(first == rank, total, 0.0)
        is_owner = (first == rank) | ((first + 1) % size == rank)
        return torch.where(divided, torch.where(is_owner, half, 0.0), own)
