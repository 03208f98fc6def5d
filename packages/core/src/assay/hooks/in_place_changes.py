"""Arguments and key/value caches that a call changes in place, which makes them its results."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor

from assay.hooks.tensors import Content, iterate_tensors


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


PARTS = ("keys", "values")


@dataclass(slots=True)
class Addition:
    """The tokens that one call added to the keys or values of one cache layer."""

    port: str
    tensor: Tensor
    """A view of the cache, (B, heads, tokens, head_dim): writing to it changes the cache."""
    history_changed: bool
    """True if the call also changed earlier tokens."""


# The keys and the values of a cache layer.
_Parts = tuple[Tensor | None, ...]


@dataclass(slots=True)
class CacheBefore:
    """A cache among the arguments of a call, and the tensors of its layers before the call."""

    name: str
    """Name of the argument."""
    cache: Any
    parts: list[_Parts]
    """Of each layer; a call may append layers."""


class CacheTracker:
    """Finds the calls that change a cache, and what they add.

    A snapshot of the cache at every step would cost the square of the length. Earlier steps added the
    other tokens; a check shows that they are unchanged.
    """

    def __init__(self) -> None:
        self._claimed: set[tuple[str, int]] = set()

    def begin_root(self) -> None:
        """Forget the additions of the last root call."""
        self._claimed.clear()

    def snapshot(self, arguments: dict[str, Any]) -> list[CacheBefore]:
        """Return the tensors of all caches among `arguments`, before a call."""
        return [
            CacheBefore(name, value, list(map(_parts_of, value.layers)))
            for name, value in arguments.items()
            if not isinstance(value, Tensor)
            and hasattr(value, "get_seq_length")
            and isinstance(getattr(value, "layers", None), list)
        ]

    def additions(
        self, caches: Sequence[CacheBefore], num_tokens: int | None
    ) -> Iterator[Addition]:
        """Yield the additions of a call that ends, without those of its callees.

        num_tokens: tokens of the root call, None if unknown.
        """
        for one in caches:
            for index, layer in enumerate(one.cache.layers):
                before = one.parts[index] if index < len(one.parts) else (None, None)
                after = _parts_of(layer)
                key = one.name, index
                if all(map(is_, after, before)) or key in self._claimed:
                    continue
                self._claimed.add(key)
                for part, tensor, previous in zip(PARTS, after, before, strict=True):
                    if isinstance(tensor, Tensor) and tensor.ndim == 4:
                        count = _num_added(tensor, previous, num_tokens)
                        yield Addition(
                            f"changed.{one.name}.{index}.{part}",
                            tensor[..., tensor.shape[-2] - count :, :],
                            _history_changed(tensor, previous, count),
                        )


def _parts_of(layer: object) -> _Parts:
    return getattr(layer, "keys", None), getattr(layer, "values", None)


def _num_added(tensor: Tensor, previous: Tensor | None, num_tokens: int | None) -> int:
    length = tensor.shape[-2]
    if num_tokens is not None:
        return min(num_tokens, length)
    before = previous.shape[-2] if isinstance(previous, Tensor) and previous.ndim == 4 else 0
    return length - before if length > before else min(1, length)


def _history_changed(tensor: Tensor, previous: Tensor | None, count: int) -> bool:
    kept = tensor.shape[-2] - count
    if kept == 0 or not isinstance(previous, Tensor) or previous.ndim != 4:
        return False
    return not torch.equal(tensor[..., :kept, :], previous[..., previous.shape[-2] - kept :, :])
