"""From gradients to weights on several ranks: accumulation, clipping, ZeRO-1, FSDP2.

References are one process, in the same precision, or numbers worked out by hand.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from assay.parallel.pipeline import Pipeline, clip_gradients, shard_parameters
from packages.core.tests.subsystem.parallel.pipeline_parallel.pipeline_runs import Case
from packages.core.tests.subsystem.parallel.tiny_models import add_lora
from packages.core.tests.subsystem.parallel.training_steps import (
    STEPS,
    Record,
    build_optimizer,
    disagreements,
    load_whole,
    named_values,
    train_alone,
    train_replicas,
    updates_since,
)

with warnings.catch_warnings():
    # Of torch's own: other optimizers of this package are scripted when it is imported.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer


def _train(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    clip: Callable[..., Tensor] = clip_gradients,
    change: Callable[[nn.Module], object] = lambda model: None,
) -> Record:
    change(model)
    optimizer = build_optimizer(model.parameters())
    before = named_values(model.named_parameters())
    record = Record()
    train_replicas(model, optimizer, mesh, range(STEPS), record, clip=clip)
    record.updates = updates_since(before, model.named_parameters())
    return record


# FSDP2


@pytest.mark.world(dp=2)
def test_two_shards_train_as_one_process(mesh: DeviceMesh, case: Case) -> None:
    actual = _train(shard_parameters(load_whole(case.folder, mesh.device_type), mesh), mesh)
    assert disagreements(actual, case.expected) == []


@pytest.mark.long
@pytest.mark.world(dp=4)
def test_four_shards_train_as_one_process(mesh: DeviceMesh, case: Case) -> None:
    actual = _train(shard_parameters(load_whole(case.folder, mesh.device_type), mesh), mesh)
    assert disagreements(actual, case.expected) == []


@pytest.mark.world(dp=2)
def test_shards_on_the_host_train_as_one_process(mesh: DeviceMesh, case: Case) -> None:
    model = shard_parameters(load_whole(case.folder, mesh.device_type), mesh, kept_on="host")
    actual = _train(model, mesh)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert disagreements(actual, case.expected) == []


def _average_gradients(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(2.0)


@pytest.mark.world(dp=2)
def test_averaged_gradients_are_detected(mesh: DeviceMesh, case: Case) -> None:
    model = shard_parameters(load_whole(case.folder, mesh.device_type), mesh)
    found = disagreements(_train(model, mesh, change=_average_gradients), case.expected)
    assert "gradients of model.norm.weight" in found
    assert "loss of step 0" not in found


def _skip_a_micro_batch(model: nn.Module) -> None:
    """The second one on each rank: its gradients are thrown away where they are made."""
    calls = []

    def forget(_: nn.Module, inputs: Any, output: Any) -> None:
        calls.append(output.logits)
        if len(calls) % 2 == 0:
            output.logits.register_hook(torch.zeros_like)

    model.register_forward_hook(forget)


@pytest.mark.world(dp=2)
def test_accumulation_without_a_micro_batch_is_detected(mesh: DeviceMesh, case: Case) -> None:
    model = shard_parameters(load_whole(case.folder, mesh.device_type), mesh)
    found = disagreements(_train(model, mesh, change=_skip_a_micro_batch), case.expected)
    assert "gradients of model.layers.0.mlp.down_proj.weight" in found
    assert "loss of step 0" not in found


# bfloat16


@pytest.mark.world(dp=2)
def test_mixed_precision_trains_as_one_process_that_rounds_alike(
    mesh: DeviceMesh, folder: Path, expected_in_bfloat16: Record
) -> None:
    model = shard_parameters(
        load_whole(folder, mesh.device_type), mesh, compute_dtype=torch.bfloat16
    )
    actual = _train(model, mesh)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert disagreements(actual, expected_in_bfloat16) == []


@pytest.mark.world(dp=2)
def test_mixed_precision_differs_from_float32(
    mesh: DeviceMesh, folder: Path, expected_in_bfloat16: Record
) -> None:
    actual = _train(shard_parameters(load_whole(folder, mesh.device_type), mesh), mesh)
    found = disagreements(actual, expected_in_bfloat16)
    assert "gradients of model.layers.0.mlp.down_proj.weight" in found


@pytest.mark.world(dp=2)
def test_gradients_reduced_in_bfloat16_are_detected(
    mesh: DeviceMesh, folder: Path, expected_in_bfloat16: Record
) -> None:
    model = load_whole(folder, mesh.device_type)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    unit: Any = model
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)
    actual = _train(model, mesh)
    found = disagreements(actual, expected_in_bfloat16)
    assert "gradients of model.layers.0.mlp.down_proj.weight" in found
    assert "loss of step 0" not in found


# Clipping


class _Weights(nn.Module):
    """A stage of which the gradients are given."""

    config = None

    def __init__(self, *gradients: list[float]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(len(g))) for g in gradients)
        for parameter, gradient in zip(self.weights, gradients, strict=True):
            parameter.grad = torch.tensor(gradient)


class _Untied:
    tie_word_embeddings = False

    def get_text_config(self) -> "_Untied":
        return self


def _pipeline_with(mesh: DeviceMesh, *gradients: list[float]) -> Pipeline:
    stage: Any = _Weights(*gradients)
    stage.config = _Untied()
    return Pipeline(stage, mesh)


def _gradients(parameters: Any) -> list[list[float]]:
    return [
        [round(value, 5) for value in parameter.grad.tolist()]
        for parameter in parameters
        if parameter.grad is not None
    ]


@pytest.mark.world(pp=2)
def test_norm_of_a_pipeline_is_that_of_all_stages(mesh: DeviceMesh) -> None:
    # 2, 3 and 6 on the first rank and 0 and 24 on the second: 4 + 9 + 36 + 576 = 25 * 25.
    first = mesh.get_local_rank() == 0
    gradients = ([2.0, 3.0], [6.0]) if first else ([0.0, 24.0],)
    pipeline = _pipeline_with(mesh, *gradients)
    assert float(pipeline.clip_gradients(5.0)) == 25.0
    expected = [[0.4, 0.6], [1.2]] if first else [[0.0, 4.8]]
    assert _gradients(pipeline.stage.parameters()) == expected


@pytest.mark.world(pp=2)
def test_gradients_below_the_limit_stay_as_they_are(mesh: DeviceMesh) -> None:
    pipeline = _pipeline_with(mesh, [3.0 if mesh.get_local_rank() == 0 else 4.0])
    assert float(pipeline.clip_gradients(5.5)) == 5.0
    assert _gradients(pipeline.stage.parameters()) == [[3.0 if mesh.get_local_rank() == 0 else 4.0]]


@pytest.mark.world(pp=2)
def test_norm_of_one_stage_is_not_that_of_the_pipeline(mesh: DeviceMesh) -> None:
    pipeline = _pipeline_with(mesh, [3.0 if mesh.get_local_rank() == 0 else 4.0])
    alone = nn.utils.clip_grad_norm_(pipeline.stage.parameters(), 1.0)
    assert float(alone) == (3.0 if mesh.get_local_rank() == 0 else 4.0)
    assert _gradients(pipeline.stage.parameters()) == [[1.0]]  # and not 0.6 or 0.8


@pytest.mark.world(dp=2)
def test_norm_of_shards_is_that_of_the_whole(mesh: DeviceMesh) -> None:
    # 9 + 16 + 144 = 13 * 13, in a shard of two elements and one of one.
    model = nn.Linear(1, 3, bias=False)
    fully_shard(model, mesh=mesh)
    model(torch.ones(1, 1)).sum().backward()
    gradient = model.weight.grad
    assert isinstance(gradient, DTensor)
    whole = torch.tensor([[3.0], [4.0], [12.0]])
    rows = slice(0, 2) if mesh.get_local_rank() == 0 else slice(2, 3)
    gradient.to_local().copy_(whole[rows])
    assert float(clip_gradients([model.weight], 6.5)) == 13.0
    torch.testing.assert_close(gradient.full_tensor(), whole / 2)


def _clip_own_shards(parameters: Any, max_norm: float) -> Tensor:
    """The norm of what this rank has, as if it were the whole."""
    local = [parameter.grad.to_local() for parameter in parameters if parameter.grad is not None]
    norm = torch.stack([gradient.square().sum() for gradient in local]).sum().sqrt()
    for gradient in local:
        gradient.mul_((max_norm / norm).clamp(max=1.0))
    return norm


@pytest.mark.world(dp=2)
def test_clipping_by_the_norm_of_own_shards_is_detected(mesh: DeviceMesh, case: Case) -> None:
    model = shard_parameters(load_whole(case.folder, mesh.device_type), mesh)
    found = disagreements(_train(model, mesh, clip=_clip_own_shards), case.expected)
    assert "norm of step 0" in found
    assert "updates of model.norm.weight" in found


# ZeRO-1


def _train_zero1(
    folder: Path, mesh: DeviceMesh, optimizer_class: type[ZeroRedundancyOptimizer]
) -> tuple[Record, set[str]]:
    """Plain replicas with gradients added up, and the names of parameters this rank updates."""
    model = load_whole(folder, mesh.device_type)
    optimizer: Any = optimizer_class(
        model.parameters(), torch.optim.AdamW, lr=1e-3, eps=1e-3, foreach=False
    )

    def reduce(model: Any) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=mesh.get_group())

    before = named_values(model.named_parameters())
    record = Record()
    train_replicas(model, optimizer, mesh, range(STEPS), record, reduce=reduce)
    record.updates = updates_since(before, model.named_parameters())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return record, {names[id(parameter)] for parameter in optimizer.optim.state}


@pytest.mark.world(dp=2)
def test_optimizer_spread_over_ranks_steps_as_one(mesh: DeviceMesh, case: Case) -> None:
    actual, own = _train_zero1(case.folder, mesh, ZeroRedundancyOptimizer)
    assert disagreements(actual, case.expected) == []
    everything: list[Any] = [None, None]
    dist.all_gather_object(everything, own)
    assert everything[0] & everything[1] == set()
    assert everything[0] | everything[1] == case.expected.updates.keys()


class _Unsynchronised(ZeroRedundancyOptimizer):
    """Each rank keeps the new values of its own parameters to itself."""

    def _sync_params(self) -> None:
        pass


@pytest.mark.world(dp=2)
def test_updates_that_do_not_reach_other_ranks_are_detected(mesh: DeviceMesh, case: Case) -> None:
    actual, _ = _train_zero1(case.folder, mesh, _Unsynchronised)
    found = disagreements(actual, case.expected)
    assert "updates of model.norm.weight" in found
    assert "gradients of model.norm.weight" not in found


# Adapters


@pytest.mark.world(dp=2)
def test_sharded_adapter_trains_as_on_one_process(mesh: DeviceMesh, folder: Path) -> None:
    expected = train_alone(add_lora(load_whole(folder)))
    assert {name.split(".")[-3] for name in expected.gradients} == {"lora_A", "lora_B"}
    actual = _train(shard_parameters(add_lora(load_whole(folder, mesh.device_type)), mesh), mesh)
    assert disagreements(actual, expected) == []


@pytest.mark.long
@pytest.mark.world(dp=2)
def test_base_that_is_trained_with_its_adapter_is_detected(mesh: DeviceMesh, folder: Path) -> None:
    expected = train_alone(add_lora(load_whole(folder)))
    model = add_lora(load_whole(folder, mesh.device_type)).requires_grad_(True)
    found = disagreements(_train(shard_parameters(model, mesh), mesh), expected)
    assert "gradients of base_model.model.model.norm.weight: unexpected" in found
    assert "updates of base_model.model.model.norm.weight" in found
