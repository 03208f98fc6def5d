"""Recognising a tensor object that was seen before, without keeping it alive."""

from typing import Generic, TypeVar
from weakref import ref

from torch import Tensor

V = TypeVar("V")


class TensorMap(Generic[V]):
    """Values by tensor object. An entry goes when its tensor does, or is changed in place."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[ref[Tensor], int, V]] = {}

    def get(self, tensor: Tensor) -> V | None:
        """The value that was put for this very object, if it has not been changed since."""
        known, version, value = self._entries.get(id(tensor), (None, 0, None))
        if known is None or known() is not tensor or version != _version(tensor):
            return None
        return value

    def put(self, tensor: Tensor, value: V) -> None:
        """Remember `value` while `tensor` lives."""
        key = id(tensor)
        known = ref(tensor, lambda _: self._entries.pop(key, None))
        self._entries[key] = (known, _version(tensor), value)

    def forget(self, tensor: Tensor) -> None:
        """Remove the entry of this object, if there is one."""
        self._entries.pop(id(tensor), None)

    def clear(self) -> None:
        """Remove all entries."""
        self._entries.clear()


def _version(tensor: Tensor) -> int:
    """How often `tensor` was changed in place; 0 where torch does not count."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - no public name
