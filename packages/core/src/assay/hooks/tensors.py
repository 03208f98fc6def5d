"""Tensors at a module boundary: nested structures, rounding, memory layout, identity.

An injected value gets the memory layout of the value that it replaces. A kernel that ignores strides or
offsets is right on contiguous tensors: if injected values were always contiguous, a replay would hide its
error.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, lru_cache
from operator import is_
from typing import Any, Generic, Literal, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn

Leaf = tuple[str, Any]

_CONSTANTS = (bool, int, float, str, type(None))


@lru_cache(maxsize=1024)
def _structure_of(kind: type) -> Literal["mapping", "sequence", "dataclass"] | None:
    """Return how objects of a class hold others; None for leaves, such as tensors and caches."""
    if issubclass(kind, Tensor):
        return None
    if issubclass(kind, Mapping):
        return "mapping"
    if issubclass(kind, list | tuple):
        return "sequence"
    return "dataclass" if is_dataclass(kind) else None


def iterate_leaves(value: object, port: str) -> list[Leaf]:
    """Return every leaf of dictionaries (ModelOutput too), lists, tuples and dataclasses with its port.

    Objects of other classes, such as caches, are leaves.
    """
    found: list[Leaf] = []
    _add_leaves(found, value, port)
    return found


def _add_leaves(found: list[Leaf], value: Any, port: str) -> None:  # noqa: ANN401 - any structure
    kind: Any = type(value)
    match _structure_of(kind):
        case None:
            found.append((port, value))
        case "mapping":
            for key, item in value.items():
                _add_leaves(found, item, f"{port}.{key}")
        case "sequence":
            for index, item in enumerate(value):
                _add_leaves(found, item, f"{port}.{index}")
        case "dataclass":
            for one in fields(value):
                _add_leaves(found, getattr(value, one.name), f"{port}.{one.name}")


def iterate_tensors(value: object, port: str) -> list[tuple[str, Tensor]]:
    """Return the tensors among the leaves of `value`."""
    return [leaf for leaf in iterate_leaves(value, port) if isinstance(leaf[1], Tensor)]


def constants(value: object, port: str) -> dict[str, object]:
    """Return the leaves of `value` that JSON can hold, by port."""
    return {
        name: leaf for name, leaf in iterate_leaves(value, port) if isinstance(leaf, _CONSTANTS)
    }


def map_tensors(
    value: Any,  # noqa: ANN401 - any structure
    port: str,
    change: Callable[[str, Tensor], Tensor],
) -> Any:  # noqa: ANN401
    """Replace every tensor of a structure by `change(port, tensor)`.

    Returns: `value` itself if nothing changed, which keeps identity, else a structure of its type.
    """
    return _map_tensors(value, port, change, _rebuild_mapping)


def replace_tensors(
    value: Any,  # noqa: ANN401 - any structure
    port: str,
    change: Callable[[str, Tensor], Tensor],
) -> Any:  # noqa: ANN401
    """Replace tensors as `map_tensors`, and write those of a dictionary into it.

    A module may add to a dictionary that later ones read, as the layers of Gemma 3n that share keys and values.
    """
    return _map_tensors(value, port, change, _update_mapping)


def _map_tensors(
    value: Any,  # noqa: ANN401 - any structure
    port: str,
    change: Callable[[str, Tensor], Tensor],
    with_items: Callable[[Any, dict[Any, Any]], Any],
) -> Any:  # noqa: ANN401
    def inner(of: Any, name: str) -> Any:  # noqa: ANN401
        return _map_tensors(of, name, change, with_items)

    kind: Any = type(value)
    match _structure_of(kind):
        case None:
            return change(port, value) if isinstance(value, Tensor) else value
        case "mapping":
            items = {key: inner(item, f"{port}.{key}") for key, item in value.items()}
            if all(map(is_, items.values(), value.values())):
                return value
            return with_items(value, items)
        case "sequence":
            parts = [inner(one, f"{port}.{index}") for index, one in enumerate(value)]
            if all(map(is_, parts, value)):
                return value
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        case "dataclass":
            changes = {}
            for item in fields(value):
                old = getattr(value, item.name)
                new = inner(old, f"{port}.{item.name}")
                if new is not old:
                    changes[item.name] = new
            return replace(value, **changes) if changes else value


def _rebuild_mapping(value: Any, items: dict[Any, Any]) -> Any:  # noqa: ANN401
    if type(value) is dict:
        return items
    # A ModelOutput is a mapping and a dataclass: it takes its items by name.
    kind: Callable[..., Any] = type(value)
    return kind(**items) if is_dataclass(value) else kind(items)


def _update_mapping(value: Any, items: dict[Any, Any]) -> Any:  # noqa: ANN401
    if is_dataclass(value) or not isinstance(value, MutableMapping):
        return _rebuild_mapping(value, items)
    value.update(items)
    return value


def cast_within_range(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a tensor; finite values stay finite, clamped to the largest number of `dtype`.

    Additive masks hold the lowest number of their dtype, which is -inf in a narrower one. A row
    with no allowed column would then become NaN.
    """
    if tensor.dtype == dtype:
        return tensor
    limit = _narrower_limit(tensor.dtype, dtype)
    if limit is not None and tensor.numel():
        low, high = torch.aminmax(tensor)
        # False for NaN, which stays NaN without a clamp
        if -float(low) > limit or float(high) > limit:
            infinite = tensor.isinf()
            return (
                tensor.clamp(-limit, limit)
                .masked_fill(infinite, torch.inf)
                .copysign(tensor)
                .to(dtype)
            )
    return tensor.to(dtype)


@cache
def _narrower_limit(dtype: torch.dtype, to: torch.dtype) -> float | None:
    """Return the largest number of the floating-point dtype `to`; None unless that of `dtype` is larger."""
    if not (dtype.is_floating_point and to.is_floating_point):
        return None
    limit = torch.finfo(to).max
    return limit if limit < torch.finfo(dtype).max else None


@dataclass(frozen=True, slots=True)
class Boundary:
    """The dtypes of floating-point values at module boundaries."""

    stored: torch.dtype | None = None
    """Dtype of stored values; None for their own."""
    rounded: torch.dtype | None = None
    """Dtype to which injected values are rounded; None to inject nothing."""

    @classmethod
    def exact_inputs_for(cls, dtype: torch.dtype) -> "Boundary":
        """Return the boundary of a yardstick whose stages all get inputs that `dtype` can hold.

        Values are stored with a relative accuracy of 2**-24 where that of `dtype` is 2**-11 or
        less, else in double precision.
        """
        wide = dtype in (torch.float32, torch.float64)
        return cls(torch.float64 if wide else torch.float32, dtype)

    def store(self, value: Tensor) -> Tensor:
        """Return the stored value; a copy if the boundary rounds."""
        stored = self.as_stored(value)
        # The injected value may be written over `value`, as into a cache.
        is_replaced = self.rounded is not None and (value.is_floating_point() or value.is_complex())
        return stored.clone() if is_replaced and stored is value else stored

    def as_stored(self, value: Tensor) -> Tensor:
        """Return the stored value; `value` itself if it has that dtype."""
        if self.stored is None or not value.is_floating_point():
            return value
        return cast_within_range(value, self.stored)

    def rounded_input(self, value: Tensor) -> Tensor:
        """Return the input of the next stage for a value, without a copy to store."""
        return self.injected(self.as_stored(value.detach()), value.dtype)

    def injected(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the input of the next stage, in `dtype`, for a stored value.

        Complex numbers are pairs of float32: torch has none of bfloat16.
        """
        if self.rounded is not None and stored.is_complex():
            return stored.to(torch.complex64).to(dtype)
        if self.rounded is None or not stored.is_floating_point():
            return cast_within_range(stored, dtype)
        return cast_within_range(cast_within_range(stored, self.rounded), dtype)


# In elements. A larger offset is shortened; its alignment is kept.
_LARGEST_OFFSET, _ALIGNMENT = 1024, 64


def laid_out_as(value: Tensor, like: Tensor) -> Tensor:
    """Return `value` with the strides and offset of `like`, which has the same shape and device.

    Gaps between elements are zero.

    Returns: `value` itself if it has that layout, or cannot have it: elements that differ would
        share memory, or `like` is a tensor subclass.
    """
    if not (_is_plain(like) and _is_plain(value)):
        return value
    strides, offset = like.stride(), like.storage_offset()
    if offset > _LARGEST_OFFSET:
        offset = _LARGEST_OFFSET + offset % _ALIGNMENT
    has_layout = value.stride() == strides and value.storage_offset() == offset
    if has_layout or value.shape != like.shape or not value.numel():
        return value
    once = value
    for dim, stride in enumerate(strides):
        if stride == 0:
            once = once.narrow(dim, 0, 1)
    if once.shape != value.shape and not torch.equal(once.expand_as(value), value):
        return value
    span = _span(once.shape, strides)
    if span is None:
        return value
    storage = value.new_zeros(offset + span).untyped_storage()
    # Not by as_strided: to autograd that is a view, which may not be changed in place.
    value.new_empty(0).set_(storage, offset, once.shape, strides).copy_(once)
    return value.new_empty(0).set_(storage, offset, value.shape, strides)


def copy_of(value: Tensor) -> Tensor:
    """Copy a tensor with its layout; `clone` closes gaps."""
    return laid_out_as(value.clone(), value)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def _span(shape: torch.Size, strides: tuple[int, ...]) -> int | None:
    """Return the number of elements from the first to the last; None if two share memory."""
    dims = sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1)
    span = 1
    for stride, size in dims:
        if stride < span:
            return None
        span += stride * (size - 1)
    return span


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


class InPlaceChanges:
    """Remembers the content of every tensor argument of a call."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._before = [
            (port.removeprefix("."), tensor, Content(tensor))
            for port, tensor in iterate_tensors(arguments, "")
        ]

    def changed(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every argument that has changed, with its port after `input.`."""
        for port, tensor, content in self._before:
            if not content.is_of(tensor):
                yield port, tensor


def write_injected(target: Tensor, injected: Tensor) -> None:
    """Write values to `target` without changing its graph or version.

    Autograd refuses a backward pass over a saved tensor with another version, and a copy in the
    graph would cut off the gradient.
    """
    with torch.inference_mode() if target.is_inference() else nullcontext():
        target.data.copy_(injected)
