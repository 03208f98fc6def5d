"""Key/value caches of transformers: their length, their layers, and what a call adds to them.

A cache is an object with `get_seq_length`. Its `layers` hold `keys` and `values`; linear layers hold neither.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, TypeGuard

import torch
from torch import Tensor

PARTS = ("keys", "values")

# The keys and the values of a cache layer.
_Parts = tuple[Tensor | None, ...]


def is_cache(value: object) -> TypeGuard[Any]:
    """Return True for a key/value cache."""
    return hasattr(value, "get_seq_length")


def count_tokens(cache: Any) -> int | None:  # noqa: ANN401 - of transformers
    """Return the number of tokens that a cache holds; None if unknown, as with linear layers alone."""
    try:
        return int(cache.get_seq_length())
    except ValueError:
        return None


def list_layers(cache: object) -> list[_Parts]:
    """Return keys and values of each layer; a layer without them has None."""
    layers = getattr(cache, "layers", None)
    return [
        tuple(getattr(layer, part, None) for part in PARTS)
        for layer in (layers if isinstance(layers, list) else ())
    ]


@dataclass(slots=True)
class Addition:
    """The tokens that one call added to the keys or values of one cache layer."""

    port: str
    tensor: Tensor
    """A view of the cache, (B, heads, tokens, head_dim): writing to it changes the cache."""
    history_changed: bool
    """True if the call also changed earlier tokens."""


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
            CacheBefore(name, value, list_layers(value))
            for name, value in arguments.items()
            if is_cache(value)
        ]

    def additions(
        self, caches: Sequence[CacheBefore], num_tokens: int | None
    ) -> Iterator[Addition]:
        """Yield the additions of a call that ends, without those of its callees.

        num_tokens: tokens of the root call, None if unknown.
        """
        for one in caches:
            for index, after in enumerate(list_layers(one.cache)):
                before = one.parts[index] if index < len(one.parts) else (None, None)
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
