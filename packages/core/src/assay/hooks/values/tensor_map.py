"""A map by tensor object that keeps no tensor alive, and notices changes in place."""

from typing import Generic, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn

V = TypeVar("V")


class Content:
    """The content of a tensor at one time: its version, or the bytes of an inference tensor.

    torch 2.13 counts operations in place (torch.Tensor._version), but not of tensors that were made in
    inference mode. Changes are not seen if they are made through `.data` or by kernels that do not declare
    them, and in inference mode if the tensor is not a plain dense one.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._bytes: Tensor | None = None
        self._version = 0
        if not tensor.is_inference():
            self._version = tensor._version  # noqa: SLF001 - no public name
        elif (content := _bytes_of(tensor)) is not None:
            self._bytes = content.clone()

    def is_of(self, tensor: Tensor) -> bool:
        """Return True if the same tensor has not changed since."""
        if not tensor.is_inference():
            return self._version == tensor._version  # noqa: SLF001 - no public name
        content = _bytes_of(tensor)
        return self._bytes is None or (content is not None and torch.equal(self._bytes, content))


def _bytes_of(tensor: Tensor) -> Tensor | None:
    """Return the bytes of a plain dense tensor, (N,) uint8; None for other kinds."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        return None
    try:
        return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    except NotImplementedError:  # a strided tensor of a dtype that torch cannot copy
        return None


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
