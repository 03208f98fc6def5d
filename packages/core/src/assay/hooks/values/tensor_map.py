"""A map by tensor object that keeps no tensor alive, and notices changes in place."""

from typing import Generic, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn

V = TypeVar("V")


class Content:
    """The content of a tensor at one time: its version, or a copy of an inference tensor.

    torch 2.13 counts operations in place (torch.Tensor._version), but not of tensors that were made in
    inference mode. Changes are not seen if they are made through `.data` or by kernels that do not declare
    them, and in inference mode if the tensor is not a plain dense one.
    """

    def __init__(self, tensor: Tensor) -> None:
        is_counted = not tensor.is_inference()
        self._copy = None if is_counted else _copy_of(tensor)
        self._version = tensor._version if is_counted else 0  # noqa: SLF001 - no public name

    def is_of(self, tensor: Tensor) -> bool:
        """Return True if the same tensor has not changed since."""
        if tensor.is_inference():
            return self._copy is None or _are_equal(self._copy, tensor)
        return self._version == tensor._version  # noqa: SLF001 - no public name


def _copy_of(tensor: Tensor) -> Tensor | None:
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        return None
    try:
        copy = tensor.clone()
        torch.equal(copy, copy)
    except (RuntimeError, NotImplementedError):  # dtypes without arithmetic
        return None
    return copy


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors hold the same values, where NaN equals NaN."""
    if one.shape != other.shape or torch.equal(one, other):
        return one.shape == other.shape
    return bool(((one == other) | ((one != one) & (other != other))).all())  # noqa: PLR0124 - NaN


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
