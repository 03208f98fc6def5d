"""Conditions under which the steps of two trainers can be compared."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from assay.devices.base import Device
from assay.hooks.values.exact_double import ExactDouble
from assay.training.replay.observing.dropout import comparable_dropout


@contextmanager
def comparable(dtype: str, device: Device) -> Iterator[None]:
    """Inside, kernels are deterministic and masks of dropout are alike in every dtype."""
    with ExitStack() as stack:
        stack.enter_context(device.deterministic())
        stack.enter_context(comparable_dropout())
        if dtype == "float64":
            stack.enter_context(ExactDouble())
        yield


def keep_no_cache(model: nn.Module) -> None:
    """Turn off the generation cache, which a training step would fill and discard.

    Each part of a model, such as the text part, reads its own configuration.
    """
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", None):
            config.use_cache = False
