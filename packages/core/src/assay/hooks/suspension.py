"""Suspending what watches or changes torch functions while our own code computes."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from assay.devices.base import suspend_execution

_state = threading.local()


def is_suspended() -> bool:
    """Whether the calling thread is inside `suspended()`."""
    return getattr(_state, "depth", 0) > 0


@contextmanager
def suspended_modes() -> Iterator[None]:
    """Run our own arithmetic: no precision mode, no operation recorder, no simulated device."""
    _state.depth = getattr(_state, "depth", 0) + 1
    try:
        with suspend_execution():
            yield
    finally:
        _state.depth -= 1


@contextmanager
def suspended() -> Iterator[None]:
    """`suspended_modes` for plain tensors: the modes are spared the look at every operation.

    Tensors of a class of their own, such as DTensor, do not work inside.
    """
    with suspended_modes(), torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # noqa: SLF001
        yield


@contextmanager
def resumed() -> Iterator[None]:
    """Inside of `suspended`, let hooks see the calls of another model."""
    depth, _state.depth = getattr(_state, "depth", 0), 0
    try:
        yield
    finally:
        _state.depth = depth
