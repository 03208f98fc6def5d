"""Conditions under which training steps of two trainers are comparable."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from assay.devices.base import Device
from assay.hooks.suspension import ExactDouble
from assay.training.replay.observing.dropout import comparable_dropout


@contextmanager
def comparable(dtype: str, device: Device) -> Iterator[None]:
    """Use deterministic kernels and dtype-independent dropout masks inside this context."""
    with ExitStack() as stack:
        stack.enter_context(device.deterministic())
        stack.enter_context(comparable_dropout())
        if dtype == "float64":
            stack.enter_context(ExactDouble())
        yield


def keep_no_cache(model: nn.Module) -> None:
    """Turn off the key-value cache in the configuration of each part of a model."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", None):
            config.use_cache = False
