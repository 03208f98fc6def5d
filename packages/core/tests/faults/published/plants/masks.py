"""Faults in masks and in what chooses them, each beside the same code without it."""

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

NO_WINDOW = 1 << 20
# Whether a query at position q may see a key at position k.
Band = Callable[[Any, Any], Any]


def band_of_other_sign(model: Any) -> None:
    """transformers#41184: the band is k < q + window, which hides nothing of the past."""
    window = model.config.sliding_window
    _make_band(model, lambda _: lambda q, k: k < q + window)


def band(model: Any) -> None:
    """No fault."""
    window = model.config.sliding_window
    _make_band(model, lambda _: lambda q, k: k > q - window)


def window_one_longer_in_prefill(model: Any) -> None:
    """transformers#29623, mlx-lm#390: both ends count, in prefill and not in decode."""
    window = model.config.sliding_window

    def choose(kwargs: dict[str, Any]) -> Band:
        more = int(kwargs["inputs_embeds"].shape[1] > 1)
        return lambda q, k: k > q - window - more

    _make_band(model, choose)


def window_that_is_switched_off(model: Any) -> None:
    """transformers#38002: use_sliding_window is not read, every layer gets the window."""
    settings = _settings(model)
    _window_all_layers(model, settings["sliding_window"])


def window_that_is_switched_off_is_not_used(model: Any) -> None:
    """No fault."""
    settings = _settings(model)
    window = settings["sliding_window"] if settings["use_sliding_window"] else NO_WINDOW
    _window_all_layers(model, window)


def right_window_one_shorter(model: Any) -> None:
    """transformers#46305: keys to the right of a query are compared by < instead of <=."""
    reach = model.config.sliding_window
    _make_both_sides(model, lambda q, k: (q - k <= reach) & (k - q < reach))


def both_windows(model: Any) -> None:
    """No fault."""
    reach = model.config.sliding_window
    _make_both_sides(model, lambda q, k: (q - k <= reach) & (k - q <= reach))


def layer_pattern_lost(model: Any) -> None:
    """vllm#21927: the pattern is looked for under its old name, all layers become local."""
    pattern = _settings(model).get("sliding_window_pattern", 1 << 20)
    _set_layer_types(model, pattern)


def layer_pattern(model: Any) -> None:
    """No fault."""
    _set_layer_types(model, _settings(model)["_sliding_window_pattern"])


def _settings(model: Any) -> dict[str, Any]:
    """The configuration as its file has it."""
    path = Path(model.config._name_or_path) / "config.json"
    settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return settings


def _set_layer_types(model: Any, pattern: int) -> None:
    model.config.layer_types = [
        "full_attention" if (number + 1) % pattern == 0 else "sliding_attention"
        for number in range(model.config.num_hidden_layers)
    ]


def _make_band(model: Any, choose: Callable[[dict[str, Any]], Band]) -> None:
    def make(original: Any, **kwargs: Any) -> Any:
        config = copy.copy(kwargs["config"])
        config.sliding_window = NO_WINDOW
        visible = choose(kwargs)
        kwargs |= {"config": config, "and_mask_function": lambda b, h, q, k: visible(q, k)}
        return original(**kwargs)

    _replace_maker(model, "create_sliding_window_causal_mask", make)


def _window_all_layers(model: Any, window: int) -> None:
    def make(original: Any, **kwargs: Any) -> Any:
        return original(**kwargs, and_mask_function=lambda b, h, q, k: k > q - window)

    _replace_maker(model, "create_causal_mask", make)


def _make_both_sides(model: Any, visible: Band) -> None:
    modeling: Any = sys.modules[type(model.model).__module__]

    def make(original: Any, **kwargs: Any) -> Any:
        del original
        return modeling.create_bidirectional_mask(
            **kwargs, and_mask_function=lambda b, h, q, k: visible(q, k)
        )

    _replace_maker(model, "create_bidirectional_sliding_window_mask", make)


def _replace_maker(model: Any, name: str, make: Callable[..., Any]) -> None:
    """Make masks by `make`, which gets the right function first."""
    modeling: Any = sys.modules[type(model.model).__module__]
    original = getattr(modeling, name)
    setattr(modeling, name, lambda **kwargs: make(original, **kwargs))
