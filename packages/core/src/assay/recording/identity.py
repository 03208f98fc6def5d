"""Recognising a tensor object that was seen before, without keeping it alive."""

from typing import Generic, TypeVar
from weakref import ref

from torch import Tensor

V = TypeVar("V")


class TensorMap(Generic[V]):
    """Values by tensor object (not by content). An entry goes when its tensor does."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[ref[Tensor], V]] = {}

    def get(self, tensor: Tensor) -> V | None:
        """What was put for this very object."""
        entry = self._entries.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def put(self, tensor: Tensor, value: V) -> None:
        """Remember `value` while `tensor` lives."""
        key = id(tensor)
        self._entries[key] = (ref(tensor, lambda _: self._entries.pop(key, None)), value)

    def forget(self, tensor: Tensor) -> None:
        """Remove the entry of this object, if there is one."""
        self._entries.pop(id(tensor), None)

    def clear(self) -> None:
        """Remove all entries."""
        self._entries.clear()
