"""A map by tensor object that keeps no tensor alive, and notices changes in place."""

from typing import Generic, TypeVar
from weakref import ref

import torch
from torch import Tensor

V = TypeVar("V")


class Content:
    """The content of a tensor at one time: its version, or a copy of an inference tensor.

    torch 2.13 counts operations in place (torch.Tensor._version), but not of tensors that were made in
    inference mode. Writes through `.data` or by kernels that do not declare them are not counted.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor.clone() if tensor.is_inference() else None
        self._version = 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - no public name

    def is_of(self, tensor: Tensor) -> bool:
        """Return True if the same tensor has not changed since. A NaN counts as a change in a copy."""
        if self._copy is not None:
            return torch.equal(self._copy, tensor)
        return self._version == tensor._version  # noqa: SLF001 - no public name


class TensorMap(Generic[V]):
    """Values by tensor object. An entry ends with its tensor, or when that changes in place."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[ref[Tensor], Content, V]] = {}

    def get(self, tensor: Tensor) -> V | None:
        """Return the value of this object, unless the object has changed since `put`."""
        entry = self._entries.get(id(tensor))
        if entry is None or entry[0]() is not tensor or not entry[1].is_of(tensor):
            return None
        return entry[2]

    def put(self, tensor: Tensor, value: V) -> None:
        """Remember `value` while `tensor` lives."""
        key = id(tensor)
        known = ref(tensor, lambda _: self._entries.pop(key, None))
        self._entries[key] = (known, Content(tensor), value)

    def forget(self, tensor: Tensor) -> None:
        """Remove the entry of this object, if there is one."""
        self._entries.pop(id(tensor), None)

    def clear(self) -> None:
        """Remove all entries."""
        self._entries.clear()
