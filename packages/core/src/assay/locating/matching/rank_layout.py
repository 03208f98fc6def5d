"""How what one rank holds at a module's boundary is a part of the whole tensor."""

from typing import Protocol

from torch import Tensor


class RankLayout(Protocol):
    """Of which whole tensors a rank's local ones are parts, as its trainer divides them.

    Every method is called by all ranks that share the tensor, in the same order. A tensor that has
    the whole shape is whole.
    """

    def holds_part(self, module: str, port: str, local: Tensor, shape: tuple[int, ...]) -> bool:
        """Whether `local` can be this rank's part of a tensor of `shape`."""
        ...

    def whole(self, module: str, port: str, local: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The tensor of `shape`, put together from what the ranks hold."""
        ...

    def whole_gradient(
        self, module: str, port: str, local: Tensor, shape: tuple[int, ...]
    ) -> Tensor:
        """The gradient of the whole, where ranks that hold the same part add up."""
        ...

    def part(self, module: str, port: str, whole: Tensor) -> Tensor:
        """This rank's part of `whole`."""
        ...

    def part_of_gradient(self, module: str, port: str, whole: Tensor) -> Tensor:
        """This rank's share of a whole gradient: all shares add up to it."""
        ...


def layout_of(
    layout: RankLayout | None, module: str, port: str, local: Tensor, shape: tuple[int, ...]
) -> RankLayout | None:
    """`layout` where `local` is a part of a tensor of `shape`; None where it is whole, or neither."""
    if layout is None or tuple(local.shape) == shape:
        return None
    return layout if layout.holds_part(module, port, local, shape) else None
