"""Faults in attention masks, which `model` makes and passes to its layers."""

import copy
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

LAYER = 2


def padding_seen(model: Any) -> None:
    """transformers#30378: padding is not masked."""

    def make(original: Any, **kwargs: Any) -> Any:
        return original(**kwargs | {"attention_mask": None})

    _replace_makers(model, make)


def window_one_longer(model: Any) -> None:
    """transformers#39408: the sliding window is off by one."""
    _change_window(model, lambda window: window + 1)


def window_one_shorter(model: Any) -> None:
    """The sliding window is off by one to the other side."""
    _change_window(model, lambda window: window - 1)


def window_lost(model: Any) -> None:
    """Layers with a sliding window see all that their cache holds."""
    _change_window(model, lambda _: 1 << 20)


def window_in_all_layers(model: Any) -> None:
    """Layers without a sliding window have one."""
    window = model.config.sliding_window

    def make(original: Any, **kwargs: Any) -> Any:
        return original(**kwargs, and_mask_function=lambda b, h, q, k: q - k < window)

    _replace_makers(model, make, ("create_causal_mask",))


def future_token_seen(model: Any) -> None:
    """Each token sees the next one."""

    def make(original: Any, **kwargs: Any) -> Any:
        return original(**kwargs, or_mask_function=lambda b, h, q, k: k == q + 1)

    _replace_makers(model, make)


def newest_token_unseen(model: Any) -> None:
    """Off by one in decode: a new token does not see itself."""

    def make(original: Any, **kwargs: Any) -> Any:
        if kwargs["inputs_embeds"].shape[1] == 1:
            kwargs["and_mask_function"] = lambda b, h, q, k: k != q
        return original(**kwargs)

    _replace_makers(model, make)


def chunks_forget_one_token(model: Any) -> None:
    """A later chunk of a prompt does not see the last token of the chunk before."""

    def make(original: Any, **kwargs: Any) -> Any:
        num_seen = kwargs["past_key_values"].get_seq_length()
        if num_seen and kwargs["inputs_embeds"].shape[1] > 1:
            kwargs["and_mask_function"] = lambda b, h, q, k: k != num_seen - 1
        return original(**kwargs)

    _replace_makers(model, make)


def lost_in_one_layer(model: Any) -> None:
    """A layer does not pass its mask to its attention."""
    layer = model.model.layers[LAYER]
    run = layer.forward

    def forward(hidden_states: Tensor, **kwargs: Any) -> Any:
        return run(hidden_states, **kwargs | {"attention_mask": None})

    layer.forward = forward


def _change_window(model: Any, change: Callable[[int], int]) -> None:
    def make(original: Any, **kwargs: Any) -> Any:
        config = copy.copy(kwargs["config"])
        config.sliding_window = change(config.sliding_window)
        return original(**kwargs | {"config": config})

    _replace_makers(model, make, ("create_sliding_window_causal_mask",))


def _replace_makers(
    model: Any,
    make: Callable[..., Any],
    names: tuple[str, ...] = ("create_causal_mask", "create_sliding_window_causal_mask"),
) -> None:
    """Make masks by `make`, which gets the right function first."""
    modeling: Any = sys.modules[type(model.model).__module__]
    found = [name for name in names if hasattr(modeling, name)]
    assert found
    for name in found:
        original = getattr(modeling, name)
        setattr(modeling, name, lambda _original=original, **kwargs: make(_original, **kwargs))
