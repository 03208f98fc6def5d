"""Arguments that a call changes in place are results of it."""

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
            (f"{name}{port}", tensor, tensor._version)  # noqa: SLF001 - there is no public name
            for name, value in arguments.items()
            for port, tensor in iterate_tensors(value, "")
            if not tensor.is_inference()
        ]

    def changed(self) -> Iterator[tuple[str, Tensor]]:
        """Every argument that was changed since, with its port after `input.`."""
        for port, tensor, version in self._before:
            if tensor._version != version:  # noqa: SLF001
                yield port, tensor


def write_injected(target: Tensor, injected: Tensor) -> None:
    """Give `target` the values of `injected` without a trace in its graph or its version.

    Autograd refuses a backward pass over a tensor whose version changed after it was saved, and a
    recorded copy would cut the gradient off.
    """
    target.data.copy_(injected)
