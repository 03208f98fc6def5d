"""Suspending all watchers and precision modes while assay itself computes."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from assay.devices.base import suspend_execution

_state = threading.local()


def is_suspended() -> bool:
    """Return True if the calling thread is inside `suspended()`."""
    return getattr(_state, "depth", 0) > 0


@contextmanager
def suspended_modes() -> Iterator[None]:
    """Compute without precision modes, operation watchers, simulated devices and inference mode.

    Tensors made in inference mode cannot be changed outside of it, as sums are that grow call by call.
    """
    _state.depth = getattr(_state, "depth", 0) + 1
    try:
        with suspend_execution(), _left_inference_mode():
            yield
    finally:
        _state.depth -= 1


@contextmanager
def _left_inference_mode() -> Iterator[None]:
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


@contextmanager
def suspended() -> Iterator[None]:
    """Suspend modes faster, for plain tensors: subclasses such as DTensor do not work inside."""
    with suspended_modes(), torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # noqa: SLF001
        yield


@contextmanager
def resumed() -> Iterator[None]:
    """Let hooks see the calls of another model inside of `suspended`."""
    depth, _state.depth = getattr(_state, "depth", 0), 0
    try:
        yield
    finally:
        _state.depth = depth
