"""FSDP2 with summed gradients, over the decoder layers of a model."""

from typing import Any, Literal, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from assay.parallel.pipeline import called_module


def shard_parameters(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype | None = None,
    kept_on: Literal["device", "host"] = "device",
) -> nn.Module:
    """Shard `model`, a decoder or a stage of it, in place: each layer as a unit, then the rest.

    Gradients are summed over ranks instead of averaged, because losses are divided by the number of
    tokens on all ranks.
    mesh: one axis, or two for replicas of shards (replicas first).
    compute_dtype: for mixed precision; parameters and reductions keep the parameters' dtype.
    kept_on: the location of shards, gradients and the optimizer's state.
    """
    options: dict[str, Any] = {"mesh": mesh}
    if compute_dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=next(model.parameters()).dtype
        )
    if kept_on == "host":
        # Pinned memory needs an accelerator.
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    for layer in decoder_layers(model):
        fully_shard(layer, **options)
    fully_shard(called_module(model), **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            unit = cast("Any", module)
            # Before torch 2.8 the divisor had another name, and sums could not be chosen.
            set_divisor = getattr(unit, "set_gradient_divide_factor", None)
            (set_divisor or unit.set_reduce_scatter_divide_factor)(1.0)
            if hasattr(unit, "set_force_sum_reduction_for_comms"):
                unit.set_force_sum_reduction_for_comms(True)
    return model


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Find the decoder layers, by the classes that transformers names for sharding."""
    names = {
        name
        for module in model.modules()
        for name in getattr(module, "_no_split_modules", None) or ()
    }
    return [module for module in model.modules() if type(module).__name__ in names]
