"""Captures of one decoder: in one process, or on two ranks as DTensors.

sharded.py FOLDER: each capture has its own folder in it.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import assay
from assay.models import load_model

IDS = torch.arange(3, 35).reshape(2, 16)


def load() -> nn.Module:
    torch.manual_seed(0)
    return load_model("micro:llama", dtype="float32").model


def load_tensor_parallel() -> nn.Module:
    columns, rows = ColwiseParallel(), RowwiseParallel()
    attention, mlp = "model.layers.*.self_attn", "model.layers.*.mlp"
    kept_apart = ColwiseParallel(use_local_output=False)
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        **{f"{attention}.{name}": columns for name in ("q_proj", "k_proj", "v_proj")},
        **{f"{mlp}.{name}": kept_apart for name in ("gate_proj", "up_proj")},
        f"{attention}.o_proj": rows,
        f"{mlp}.down_proj": rows,
    }
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
    return parallelize_module(load(), mesh, plan)


def load_fully_sharded() -> nn.Module:
    model = load()
    for number in range(4):
        fully_shard(model.get_submodule(f"model.layers.{number}"))
    fully_shard(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # add gradients up, as one process does
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def break_weight(model: nn.Module) -> nn.Module:
    """Scale what rank 1 holds of a weight."""
    weight = model.get_parameter("model.layers.1.mlp.up_proj.weight")
    if dist.get_rank() == 1 and isinstance(weight, DTensor):
        with torch.no_grad():
            weight.to_local().mul_(1.05)
    return model


def infer(model: nn.Module, folder: Path, batches: list[Tensor]) -> None:
    is_of_statistics = folder.name.endswith("statistics")
    with assay.capture(model.eval(), folder, stats_only=is_of_statistics), torch.no_grad():
        for ids in batches:
            cache = model(input_ids=ids, use_cache=True).past_key_values
            model(input_ids=ids[:, :1], past_key_values=cache)


def train(
    model: nn.Module, folder: Path, batches: list[Tensor], *, max_norm: float | None = 1.0
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    with assay.capture(model.train(), folder, weights=True):
        for step in range(3):
            for ids in batches:
                model(input_ids=ids + step, labels=ids + step).loss.backward()
            if max_norm is not None:  # torch does not clip DTensors together with plain tensors
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()


folder = Path(sys.argv[1])
if dist.is_torchelastic_launched():
    dist.init_process_group("gloo")
    own = [IDS[dist.get_rank()][None]]
    infer(load_tensor_parallel(), folder / "tp", [IDS])
    infer(break_weight(load_tensor_parallel()), folder / "tp-fault", [IDS])
    infer(load_tensor_parallel(), folder / "tp-statistics", [IDS])
    train(load_fully_sharded(), folder / "fsdp", own)
    train(break_weight(load_fully_sharded()), folder / "fsdp-fault", own)
    train(load_tensor_parallel(), folder / "tp-steps", [IDS], max_norm=None)
    train(break_weight(load_tensor_parallel()), folder / "tp-steps-fault", [IDS], max_norm=None)
    dist.destroy_process_group()
else:
    infer(load(), folder / "batch", [IDS])
    infer(load(), folder / "requests", [*IDS[:, None]])
    train(load(), folder / "steps", [*IDS[:, None]])
    train(load(), folder / "unclipped", [IDS], max_norm=None)
