"""The relation between a rank's tensor at a module boundary and the whole tensor."""

from typing import Protocol

from torch import Tensor


class RankLayout(Protocol):
    """The sharding of tensors over ranks by a trainer.

    All ranks that share a tensor call each method, in the same order. A tensor of the whole shape is
    whole.
    """

    def holds_part(self, module: str, port: str, local: Tensor, shape: tuple[int, ...]) -> bool:
        """Return True if `local` can be this rank's part of a tensor of `shape`."""
        ...

    def whole(self, module: str, port: str, local: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor of `shape`, assembled from the parts of all ranks."""
        ...

    def whole_gradient(
        self, module: str, port: str, local: Tensor, shape: tuple[int, ...]
    ) -> Tensor:
        """Return the gradient of the whole tensor, the sum over ranks that hold the same part."""
        ...

    def part(self, module: str, port: str, whole: Tensor) -> Tensor:
        """Return this rank's part of `whole`."""
        ...

    def part_of_gradient(self, module: str, port: str, whole: Tensor) -> Tensor:
        """Return this rank's share of a whole gradient, the sum of all shares."""
        ...


def layout_of(
    layout: RankLayout | None, module: str, port: str, local: Tensor, shape: tuple[int, ...]
) -> RankLayout | None:
    """Return `layout` if `local` is a part of a tensor of `shape`; None if it is whole, or neither."""
    if layout is None or tuple(local.shape) == shape:
        return None
    return layout if layout.holds_part(module, port, local, shape) else None
