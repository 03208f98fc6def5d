"""Loads a rank's part of a model from a folder, divided over any of the axes pp, tp and dp."""

from pathlib import Path

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from assay.models import load_model
from assay.parallel.pipeline import cut_stage, shard_parameters
from assay.parallel.tensor_parallel import apply_tensor_parallel
from packages.core.tests.subsystem.parallel.training_steps import load_whole


def load_stage(folder: Path, index: int, num_stages: int, device: str = "cpu") -> nn.Module:
    whole = load_model(str(folder), dtype="float32", attention="eager").model
    return cut_stage(whole, num_stages, index).to(device).train()


def load_divided(folder: Path, mesh: DeviceMesh) -> nn.Module:
    axes = mesh.mesh_dim_names or ()
    if "pp" in axes:
        axis = mesh["pp"]
        model = load_stage(folder, axis.get_local_rank(), axis.size(), mesh.device_type)
    else:
        model = load_whole(folder, mesh.device_type)
    if "tp" in axes:
        apply_tensor_parallel(model, mesh["tp"])
    if "dp" in axes:
        shard_parameters(model, mesh["dp"])
    return model
