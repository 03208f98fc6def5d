"""The feature `compile`: compiles every decoder layer in place, before any wrapping."""

from typing import Any

from torch import nn

from assay.devices.base import DeviceVendor
from assay.errors import UsageError
from assay.parallel.fsdp import decoder_layers

# Dynamo keeps this many compilations of one function, and runs further shapes uncompiled. No run has
# so many shapes.
_MOST_COMPILATIONS = 4096


def backend_of(vendor: DeviceVendor) -> str:
    """Return the backend of `torch.compile` for training."""
    return vendor.training_compile_backend or vendor.compile_backend


def describe_compiling(vendor: DeviceVendor) -> str:
    """Describe compilation for a verdict."""
    return (
        f"decoder layers are compiled by {backend_of(vendor)}; where modules are measured, each is"
        " compiled by itself, and the free run alone shows what is computed in one piece"
    )


def compile_layers(model: nn.Module, vendor: DeviceVendor) -> None:
    """Compile each decoder layer of `model` at its first call, without renaming it.

    Raises: UsageError for a model without known layers.
    """
    import torch._dynamo.config as dynamo

    layers = decoder_layers(model)
    if not layers:
        raise UsageError(
            f"{type(model).__name__} names no decoder layers (_no_split_modules) to compile"
        )
    dynamo.recompile_limit = max(dynamo.recompile_limit, _MOST_COMPILATIONS)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, _MOST_COMPILATIONS)
    if hasattr(model.config, "use_cache"):
        model.register_forward_pre_hook(_without_cache, with_kwargs=True)
    for layer in layers:
        # Each shape has its own compilation, so that results of a resumed run do not depend on earlier
        # shapes. Few compilers of accelerators support dynamic shapes, and tracing them takes five
        # times as long.
        layer.compile(backend=backend_of(vendor), dynamic=False)


def _without_cache(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Turn off the key-value cache, with which no two layers share a compilation."""
    return args, {"use_cache": False, **kwargs}
