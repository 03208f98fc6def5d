"""Faults of caches of keys and values, each beside the same code without it."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

LAYER = 1
# The largest number of float8 e4m3.
LARGEST = 448.0

Written = tuple[Tensor, Tensor]


def slots_of_later_chunk_shifted(model: Any) -> None:
    """mlxcel#678: a later chunk of a prompt is kept one slot further than where it belongs."""
    del model
    _change_kept(_LaterChunk(shift=1))


def slots_of_later_chunk(model: Any) -> None:
    """No fault."""
    del model
    _change_kept(_LaterChunk(shift=0))


def prefix_of_other_text(model: Any) -> None:
    """sglang#38319: pages of a prefix are freed too early, and used for another prompt."""
    del model
    _change_kept(lambda layer, _: _copy_prefix(layer, 1))


def prefix_of_own_text(model: Any) -> None:
    """No fault."""
    del model
    _change_kept(lambda layer, _: _copy_prefix(layer, 0))


def scale_of_one(model: Any) -> None:
    """sglang#18818: calibrated scales are not found, what is beyond 448 saturates.

    Without the rounding to 8 bits, which scales of its own would not avoid either.
    """
    del model
    _change_written(lambda k, v: (_saturate(k, 1.0), _saturate(v, 1.0)))


def scale_that_was_calibrated(model: Any) -> None:
    """No fault."""
    del model
    _change_written(lambda k, v: (_saturate(k, _scale_of(k)), _saturate(v, _scale_of(v))))


def scale_captured_before_it_was_set(model: Any) -> None:
    """InfiniLM#553: the consumer has the scale's first value, zero, and reads zeros."""
    del model
    scale = 0.0
    _change_written(lambda k, v: (k * scale, v * scale))


def scale_read_when_it_is_used(model: Any) -> None:
    """No fault."""
    del model
    scale = 1.0
    _change_written(lambda k, v: (k * scale, v * scale))


class _LaterChunk:
    """Moves what a layer keeps of a chunk that is not the first of its prompt."""

    def __init__(self, shift: int) -> None:
        self.shift = shift

    def __call__(self, layer: Any, num_new: int) -> None:
        num_kept = layer.keys.shape[-2]
        if num_new > 1 and layer.cumulative_length > num_new:
            num_moved = min(num_new, num_kept)
            for name in ("keys", "values"):
                kept = getattr(layer, name).clone()
                kept[..., -num_moved:, :] = kept[..., -num_moved:, :].roll(self.shift, -2)
                setattr(layer, name, kept)


def _copy_prefix(layer: Any, distance: int) -> None:
    """What the rows keep of their first 16 tokens becomes that of the row `distance` before."""
    layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
    for kept in (layer.keys, layer.values):
        kept[..., :16, :] = kept[..., :16, :].roll(distance, 0)


def _saturate(x: Tensor, scale: float) -> Tensor:
    return (x / scale).clamp(-LARGEST, LARGEST) * scale


def _scale_of(x: Tensor) -> float:
    """A power of two, so that nothing is rounded by it."""
    scale = 1.0
    while float(x.abs().max()) > LARGEST * scale:
        scale *= 2
    return scale


def _change_written(change: Callable[[Tensor, Tensor], Written]) -> None:
    _replace(lambda original, _, k, v: original(*change(k, v)))


def _change_kept(after: Callable[[Any, int], None]) -> None:
    """Let `after` change what the layer keeps, once what the step needs was copied."""

    def update(original: Any, cache: Any, k: Tensor, v: Tensor) -> Any:
        needed = tuple(tensor.clone() for tensor in original(k, v))
        after(cache.layers[LAYER], k.shape[-2])
        return needed

    _replace(update)


def _replace(update: Callable[..., Any]) -> None:
    original = Cache.update

    def planted(
        self: Any,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if layer_idx != LAYER:
            return original(self, key_states, value_states, layer_idx, *args, **kwargs)

        def as_it_was(k: Tensor, v: Tensor) -> Any:
            return original(self, k, v, layer_idx, *args, **kwargs)

        return update(as_it_was, self, key_states, value_states)

    Cache.update = planted  # type: ignore[method-assign]
