"""Changes of a model that a replay is to find, or to let pass."""

from collections.abc import Callable
from typing import Any

import torch

Plant = Callable[[Any], None]


def scale_weights(path: str, factor: float) -> Plant:
    def plant(model: Any) -> None:
        with torch.no_grad():
            model.get_submodule(path).weight.mul_(factor)

    return plant


def replace_forward(path: str, forward: Callable[..., Any]) -> Plant:
    """`forward(module, original, *args, **kwargs)` in place of the module's own."""

    def plant(model: Any) -> None:
        module = model.get_submodule(path)
        original = module.forward
        module.forward = lambda *args, **kwargs: forward(module, original, *args, **kwargs)

    return plant


def do_nothing(_model: Any) -> None:
    pass
