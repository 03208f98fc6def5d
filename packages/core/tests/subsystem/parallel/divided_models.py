"""Loads a rank's part of a model from a folder, divided over any of the axes pp, tp and dp."""

from pathlib import Path

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from assay.models import load_model
from assay.parallel.fsdp import shard_parameters
from assay.parallel.pipeline_parallel.stages import StagePlan, cut_stage
from assay.parallel.tensor_parallel.decoder import apply_tensor_parallel
from packages.core.tests.subsystem.parallel.training_steps import NUM_LAYERS, load_whole


def load_stage(folder: Path, index: int, plan: StagePlan, device: str = "cpu") -> nn.Module:
    whole = load_model(str(folder), dtype="float32", attention="eager").model
    return cut_stage(whole, plan, index).to(device).train()


def load_divided(folder: Path, mesh: DeviceMesh) -> nn.Module:
    axes = mesh.mesh_dim_names or ()
    if "pp" in axes:
        plan = StagePlan.balanced(NUM_LAYERS, mesh["pp"].size())
        model = load_stage(folder, mesh["pp"].get_local_rank(), plan, mesh.device_type)
    else:
        model = load_whole(folder, mesh.device_type)
    if "tp" in axes:
        apply_tensor_parallel(model, mesh["tp"])
    if "dp" in axes:
        shard_parameters(model, mesh["dp"])
    return model
