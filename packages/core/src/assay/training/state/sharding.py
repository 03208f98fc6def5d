"""Values that are spread over ranks: put together, and taken apart again.

Every function is a collective where a value is a DTensor: all ranks of its mesh call it, in the
same order.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(value: Tensor) -> Tensor:
    """The whole tensor, on every rank."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def put(target: Tensor, value: Tensor) -> None:
    """Make `target`, or what this rank holds of it, equal to the whole `value`."""
    with torch.no_grad():
        target.copy_(part_like(value, target))


def part_like(value: Tensor, like: Tensor) -> Tensor:
    """The whole `value`, spread over ranks as `like` is, on its device and in its dtype."""
    value = value.to(device=like.device, dtype=like.dtype)
    if not isinstance(like, DTensor):
        return value
    # Every rank has the whole value: nothing is sent.
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def moment_like(value: object, parameter: Tensor) -> object:
    """A whole moment, spread over ranks as its parameter is; a counter as it is. A copy."""
    if not isinstance(value, Tensor):
        return value
    return part_like(value, parameter.detach()).clone() if value.ndim else value.detach().clone()


def coordinates_of(value: Tensor) -> tuple[tuple[int, int], ...]:
    """For each mesh axis that divides `value` its number, and this rank's place on it."""
    if not isinstance(value, DTensor):
        return ()
    places = value.device_mesh.get_coordinate() or [0] * len(value.placements)
    return tuple(
        (axis, place)
        for axis, (place, placement) in enumerate(zip(places, value.placements, strict=True))
        if not placement.is_replicate()
    )


def local_part(value: Tensor) -> Tensor:
    """What this rank holds."""
    return value.to_local() if isinstance(value, DTensor) else value


class PartialSums:
    """Gradients before their reduction: every rank of `group` holds a part of each sum."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    @property
    def num_ranks(self) -> int:
        """How many parts each sum has."""
        return self._group.size()

    def total(self, value: Tensor) -> Tensor:
        """The sum over the ranks, added up in float64."""
        total = value.detach().to("cpu", torch.float64)
        dist.all_reduce(total, group=self._group)
        return total

    def products_by_owner(self, actual: Tensor, expected: Tensor) -> Tensor:
        """Return sums of actual * expected and expected**2 by owning rank, (2, ranks).

        A rank owns the elements that `share` gave to it whole.
        """
        products = torch.stack([actual * expected, expected * expected]).flatten(1)
        turn = torch.arange(products.shape[1], device=products.device) % (2 * self.num_ranks)
        sums = products.new_zeros(2, 2 * self.num_ranks).index_add_(1, turn, products)
        return sums[:, : self.num_ranks]

    def share(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        """This rank's part of a sum, which is exact in `dtype`.

        The elements take turns: one rank has all of an element, or it and the next one have a half
        each. A reduction that takes one part for all, the largest, or a mean of some, is seen.
        """
        size, rank = self._group.size(), self._group.rank()
        number = torch.arange(total.numel(), device=total.device).reshape(total.shape) % (2 * size)
        half = total / 2
        divided = (number >= size) & (half.abs() >= torch.finfo(dtype).tiny)
        first = number % size
        own = torch.where(first == rank, total, 0.0)
        is_owner = (first == rank) | ((first + 1) % size == rank)
        return torch.where(divided, torch.where(is_owner, half, 0.0), own)
