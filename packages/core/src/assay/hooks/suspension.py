"""Suspending all watchers and precision modes while assay itself computes."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any

import torch

from assay.devices.base import SuspendedExecution


class _State(threading.local):
    depth = 0


_state = _State()


def is_suspended() -> bool:
    """Return True if the calling thread is inside `suspended()`."""
    return _state.depth > 0


class _Suspension:
    """A context inside of other ones. Hooks enter it twice in a module call, and generators are slow."""

    def __init__(self, *inside: AbstractContextManager[Any]) -> None:
        if torch.is_inference_mode_enabled():
            inside = (torch.inference_mode(mode=False), torch.no_grad(), *inside)
        self._inside = (SuspendedExecution(), *inside)

    def __enter__(self) -> None:
        _state.depth += 1
        for one in self._inside:
            one.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for one in reversed(self._inside):
            one.__exit__(kind, error, traceback)
        _state.depth -= 1


def suspended_modes() -> AbstractContextManager[None]:
    """Compute without precision modes, operation watchers, simulated devices and inference mode.

    Tensors made in inference mode cannot be changed outside of it, as sums are that grow call by call.
    """
    return _Suspension()


def suspended() -> AbstractContextManager[None]:
    """Suspend modes faster, for plain tensors: subclasses such as DTensor do not work inside."""
    return _Suspension(torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch())  # noqa: SLF001


@contextmanager
def resumed() -> Iterator[None]:
    """Let hooks see the calls of another model inside of `suspended`."""
    depth, _state.depth = _state.depth, 0
    try:
        yield
    finally:
        _state.depth = depth
