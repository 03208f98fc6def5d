"""Arguments that a call changes in place, which are results of the call."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from assay.hooks.values.nested import iterate_tensors


class InPlaceChanges:
    """Remembers the version of every tensor argument of a call.

    Versions count in-place operations (torch.Tensor._version); writes through `.data` or by
    kernels that do not declare them are not counted.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._before = [
            (port.removeprefix("."), tensor, tensor._version)  # noqa: SLF001 - no public name
            for port, tensor in iterate_tensors(arguments, "")
            if not tensor.is_inference()
        ]

    def changed(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every argument that has changed, with its port after `input.`."""
        for port, tensor, version in self._before:
            if tensor._version != version:  # noqa: SLF001
                yield port, tensor


def write_injected(target: Tensor, injected: Tensor) -> None:
    """Write values to `target` without changing its graph or version.

    Autograd refuses a backward pass over a saved tensor with another version, and a copy in the
    graph would cut off the gradient.
    """
    target.data.copy_(injected)
