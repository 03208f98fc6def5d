"""Arguments and key/value caches that a call changes in place, which makes them its results."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from assay.hooks.values.nested import iterate_tensors
from assay.hooks.values.tensor_map import Content


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


_Key = tuple[str, int]


class CacheTracker:
    """Finds the calls that change a cache, and what they add.

    A snapshot of the cache at every step would cost the square of the length. Earlier steps added the
    other tokens; a check shows that they are unchanged.
    """

    def __init__(self) -> None:
        self._claimed: set[_Key] = set()

    def begin_root(self) -> None:
        """Forget the additions of the last root call."""
        self._claimed.clear()

    def snapshot(self, arguments: dict[str, Any]) -> dict[_Key, tuple[Tensor | None, ...]]:
        """Return the tensors of all caches among `arguments`, before a call."""
        return {
            (name, index): tuple(getattr(layer, part, None) for part in PARTS)
            for name, index, layer in _layers(arguments)
        }

    def additions(
        self,
        arguments: dict[str, Any],
        before: dict[_Key, tuple[Tensor | None, ...]],
        num_tokens: int | None,
    ) -> Iterator[Addition]:
        """Yield the additions of a call that ends, without those of its callees.

        num_tokens: tokens of the root call, None if unknown.
        """
        for name, index, layer in _layers(arguments):
            key = (name, index)
            old = before.get(key, (None, None))
            new = tuple(getattr(layer, part, None) for part in PARTS)
            if key in self._claimed or all(a is b for a, b in zip(new, old, strict=True)):
                continue
            self._claimed.add(key)
            for part, tensor, previous in zip(PARTS, new, old, strict=True):
                if isinstance(tensor, Tensor) and tensor.ndim == 4:
                    count = _num_added(tensor, previous, num_tokens)
                    yield Addition(
                        f"changed.{name}.{index}.{part}",
                        tensor[..., tensor.shape[-2] - count :, :],
                        _history_changed(tensor, previous, count),
                    )


def _layers(arguments: dict[str, Any]) -> Iterator[tuple[str, int, Any]]:
    for name, value in arguments.items():
        layers = getattr(value, "layers", None)
        if hasattr(value, "get_seq_length") and isinstance(layers, list):
            for index, layer in enumerate(layers):
                yield name, index, layer


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
