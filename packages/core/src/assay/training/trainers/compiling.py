"""The feature `compile`: every decoder layer is compiled in place, before anything is wrapped around it."""

from typing import Any

from torch import nn

from assay.devices.base import DeviceVendor
from assay.errors import UsageError
from assay.parallel.layers import decoder_layers

# Dynamo keeps so many compilations of one function, and runs what is beyond them uncompiled: more
# than the shapes of any run here.
_MOST_COMPILATIONS = 4096


def backend_of(vendor: DeviceVendor) -> str:
    """The name for `torch.compile(backend=...)` by which training is compiled."""
    return vendor.training_compile_backend or vendor.compile_backend


def describe_compiling(vendor: DeviceVendor) -> str:
    """What a verdict says of it."""
    return (
        f"decoder layers are compiled by {backend_of(vendor)}; where modules are measured, each is"
        " compiled by itself, and the free run alone shows what is computed in one piece"
    )


def compile_layers(model: nn.Module, vendor: DeviceVendor) -> None:
    """Have each decoder layer of `model` compiled when it is first called; its name stays.

    Raises: UsageError for a model whose layers are not known.
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
        # For each shape anew: what a resumed run computes must not hang on the shapes before. One
        # program for all shapes would do, but few compilers of accelerators make it, and tracing
        # it takes five times as long.
        layer.compile(backend=backend_of(vendor), dynamic=False)


def _without_cache(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Training reads no key-value cache; with one, no two layers share a compilation."""
    return args, {"use_cache": False, **kwargs}
