"""Faults in what an attention writes into its cache."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

LAYER = 1


def values_1_percent(model: Any) -> None:
    """Values are 1 % too large when they are written."""
    _change_written(model, lambda k, v: (k, (v.double() * 1.01).to(v.dtype)))


def keys_in_float8(model: Any) -> None:
    """Keys are kept in e4m3, which is not declared."""
    _change_written(model, lambda k, v: (k.to(torch.float8_e4m3fn).to(k.dtype), v))


def heads_exchanged(model: Any) -> None:
    """The values of the two heads are exchanged."""
    _change_written(model, lambda k, v: (k, v.flip(1)))


def write_dropped(model: Any) -> None:
    """Every eighth token of a decode is not written; the step itself does not need it."""

    def after(layer: Any, step: int) -> None:
        if step % 8 == 0:
            layer.keys[..., -1, :] = 0
            layer.values[..., -1, :] = 0

    _change_kept(model, after)


def old_token_overwritten(model: Any) -> None:
    """A decode step also overwrites the fourth last token."""

    def after(layer: Any, step: int) -> None:
        if step == 5:
            layer.values[..., -4, :] = 0

    _change_kept(model, after)


def rows_exchanged(model: Any) -> None:
    """The first two rows of a batch change places during a decode."""

    def after(layer: Any, step: int) -> None:
        if step == 4 and layer.keys.shape[0] > 1:
            order = [1, 0, *range(2, layer.keys.shape[0])]
            layer.keys, layer.values = layer.keys[order], layer.values[order]

    _change_kept(model, after)


def _change_written(model: Any, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    def update(original: Any, cache: Any, k: Tensor, v: Tensor) -> Any:
        del cache
        return original(*change(k, v))

    _replace(model, update)


def _change_kept(model: Any, after: Callable[[Any, int], None]) -> None:
    """Let `after` change a layer that keeps its tokens, after what the step needs was copied."""
    num_steps = 0

    def update(original: Any, cache: Any, k: Tensor, v: Tensor) -> Any:
        nonlocal num_steps
        needed = tuple(tensor.clone() for tensor in original(k, v))
        num_steps = num_steps + 1 if k.shape[-2] == 1 else 0
        if num_steps:
            layer = cache.layers[LAYER]
            layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
            after(layer, num_steps)
        return needed

    _replace(model, update)


def _replace(model: Any, update: Callable[..., Any]) -> None:
    del model
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
