"""A map by tensor object that keeps no tensor alive."""

from typing import Generic, TypeVar
from weakref import ref

from torch import Tensor

V = TypeVar("V")


class TensorMap(Generic[V]):
    """Values by tensor object. An entry ends with its tensor, or when that changes in place."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[ref[Tensor], int, V]] = {}

    def get(self, tensor: Tensor) -> V | None:
        """Return the value of this object, unless the object has changed since `put`."""
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
    """Return the number of changes in place; 0 for inference tensors, which torch does not count."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - no public name
