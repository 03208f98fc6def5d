"""Parameters and buffers by their names in the unwrapped model, whole and as ranks hold them.

For a DTensor every function is a collective: all ranks of its mesh call it in the same order.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from assay.sites import unwrapped_path

# Half a megabyte in float64. An intermediate result of a whole embedding exceeds the caches, and the
# operating system clears its memory: 8 M squares took 40 ms at once, and 4 ms in blocks.
_BLOCK_ELEMENTS = 1 << 16


@dataclass(frozen=True, slots=True)
class NamedParameter:
    """A parameter and the module that owns it."""

    name: str
    """Full name in the unwrapped model."""
    module: str
    kind: str
    tensor: nn.Parameter


def named_parameters(model: nn.Module) -> list[NamedParameter]:
    """List all parameters, each once."""
    modules = dict(model.named_modules())
    found = []
    for path, parameter in model.named_parameters():
        owner, _, name = path.rpartition(".")
        module = unwrapped_path(owner)
        full = f"{module}.{name}" if module else name
        found.append(NamedParameter(full, module, type(modules[owner]).__name__, parameter))
    return found


def untrained_values(model: nn.Module) -> dict[str, Tensor]:
    """Return buffers and frozen parameters by their names in the unwrapped model."""
    values: dict[str, Tensor] = dict(model.named_buffers())
    values |= {name: p for name, p in model.named_parameters() if not p.requires_grad}
    return {unwrapped_path(name): value for name, value in values.items()}


def in_blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield equal parts of tensors of one shape, flattened; on accelerators one part with all elements.

    Parts of contiguous tensors share memory with them.
    """
    size = max(1, tensors[0].numel())
    if all(one.device.type == "cpu" for one in tensors):
        size = min(size, _BLOCK_ELEMENTS)
    return zip(*(one.reshape(-1).split(size) for one in tensors), strict=True)


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
