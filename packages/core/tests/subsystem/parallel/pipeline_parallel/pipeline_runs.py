"""Pipelines over the axes pp, dp and tp, trained as one process trains the whole model."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from assay.parallel.pipeline import Pipeline, shard_parameters
from assay.parallel.tensor_parallel import apply_tensor_parallel
from packages.core.tests.subsystem.parallel.divided_models import load_stage
from packages.core.tests.subsystem.parallel.training_steps import (
    MAX_NORM,
    STEPS,
    Record,
    build_optimizer,
    named_gradients,
    named_values,
    num_label_tokens,
    step_batch,
    to_device,
    updates_since,
)

Stages = dict[int, nn.Module]
"""This rank's stage by its number."""


@dataclass(frozen=True)
class Case:
    """A model on disk, and the results of training it on one process."""

    architecture: str
    folder: Path
    expected: Record


def load_own_stage(folder: Path, mesh_pp: DeviceMesh) -> Stages:
    index = mesh_pp.get_local_rank()
    return {index: load_stage(folder, index, mesh_pp.size(), mesh_pp.device_type)}


def divide_stage(stage: nn.Module, mesh: DeviceMesh) -> None:
    axes = mesh.mesh_dim_names or ()
    if "tp" in axes:
        apply_tensor_parallel(stage, mesh["tp"])
    if "dp" in axes:
        shard_parameters(stage, mesh["dp"])


def train_stages(
    folder: Path,
    mesh: DeviceMesh,
    *,
    rows: int = 2,
    change: Callable[[Stages], object] = lambda stages: None,
    divide: Callable[[nn.Module, DeviceMesh], object] = divide_stage,
    pipeline_class: Callable[..., Pipeline] = Pipeline,
) -> Record:
    """Each data-parallel rank has every nth of the `rows` of all micro-batches.

    change: what is done to this rank's stage before it is divided.
    """
    stages = load_own_stage(folder, mesh["pp"])
    change(stages)
    (stage,) = stages.values()
    divide(stage, mesh)
    pipeline = pipeline_class(stage, mesh["pp"])
    named = [*stage.named_parameters()]
    optimizer = build_optimizer(stage.parameters())
    before = named_values(named)
    record = Record()
    train_pipeline(pipeline, named, optimizer, mesh, range(STEPS), record, rows=rows)
    record.updates = updates_since(before, named)
    return record


def train_pipeline(
    pipeline: Pipeline,
    named: Sequence[tuple[str, nn.Parameter]],
    optimizer: torch.optim.Optimizer,
    mesh: DeviceMesh,
    steps: Iterable[int],
    record: Record,
    *,
    rows: int = 2,
) -> None:
    """Add `steps` to `record`; named: the parameters of this rank's stage."""
    for step in steps:
        batch = step_batch(step, rows=rows)
        optimizer.zero_grad()
        loss = pipeline.forward_backward(_own_rows(batch, mesh), num_label_tokens(batch))
        if "dp" in (mesh.mesh_dim_names or ()):
            dist.all_reduce(loss, group=mesh["dp"].get_group())
        if not record.gradients:
            record.gradients = named_gradients(named)
        record.losses.append(loss.item())
        record.norms.append(float(pipeline.clip_gradients(MAX_NORM)))
        optimizer.step()


def _own_rows(batch: list[dict[str, Tensor]], mesh: DeviceMesh) -> list[dict[str, Tensor]]:
    batch = to_device(batch, mesh.device_type)
    if "dp" not in (mesh.mesh_dim_names or ()):
        return batch
    first, step = mesh["dp"].get_local_rank(), mesh["dp"].size()
    return [{name: tensor[first::step] for name, tensor in part.items()} for part in batch]


class OwnNorm(Pipeline):
    """Clips by the norm of this rank's stage, as torch's own function does."""

    def clip_gradients(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.stage.parameters(), max_norm)


class MicroBatchMeans(Pipeline):
    """Divides each micro-batch by as many tokens as if all had equally many."""

    def forward_backward(self, batch: list[dict[str, Tensor]], _: int) -> torch.Tensor:  # type: ignore[override]
        return super().forward_backward(batch, 4 * num_label_tokens(batch[:1]))
