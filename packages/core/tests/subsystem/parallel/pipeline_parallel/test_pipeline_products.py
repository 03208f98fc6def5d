"""Pipelines together with other ways to divide a model, and with adapters and recomputation."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from assay.parallel.pipeline import Pipeline, shard_parameters
from packages.core.tests.subsystem.parallel.judging import ratios
from packages.core.tests.subsystem.parallel.pipeline_parallel.pipeline_runs import (
    Case,
    Stages,
    train_stages,
)
from packages.core.tests.subsystem.parallel.tiny_models import add_lora
from packages.core.tests.subsystem.parallel.training_steps import (
    Record,
    disagreements,
    load_whole,
    train_alone,
)

ARCHITECTURES = ("granite-untied", "mixtral")


@pytest.mark.parametrize("case", ARCHITECTURES, indirect=True)
@pytest.mark.world(pp=2, dp=2)
def test_sharded_stages_train_as_one_process(mesh: DeviceMesh, case: Case) -> None:
    assert disagreements(train_stages(case.folder, mesh), case.expected) == []


@pytest.mark.long
@pytest.mark.parametrize("case", ARCHITECTURES, indirect=True)
@pytest.mark.world(pp=2, tp=2)
def test_divided_stages_train_as_one_process(mesh: DeviceMesh, case: Case) -> None:
    assert disagreements(train_stages(case.folder, mesh), case.expected) == []


@pytest.mark.long
@pytest.mark.parametrize("case", ["granite-untied"], indirect=True)
@pytest.mark.world(dp=2, tp=2, pp=2)
def test_all_three_axes_train_as_one_process(mesh: DeviceMesh, case: Case) -> None:
    assert disagreements(train_stages(case.folder, mesh), case.expected) == []


@pytest.mark.long
@pytest.mark.parametrize("case", ["granite-untied"], indirect=True)
@pytest.mark.world(dp=4, tp=2, pp=4)
def test_32_ranks_train_as_one_process(
    mesh: DeviceMesh, case: Case, expected_of_four_rows: Record
) -> None:
    actual = train_stages(case.folder, mesh, rows=4)
    assert disagreements(actual, expected_of_four_rows) == []
    assert disagreements(actual, case.expected)  # half of the rows


class _OneByOne(Pipeline):
    """Micro-batches, which differ in length, go through alone: stages are built anew for each."""

    def forward_backward(
        self, batch: Sequence[Mapping[str, Tensor]], num_step_tokens: int
    ) -> Tensor:
        losses = [super(_OneByOne, self).forward_backward([one], num_step_tokens) for one in batch]
        return torch.stack(losses).sum()


@pytest.mark.long
@pytest.mark.world(pp=2, dp=2)
def test_sharded_stages_keep_their_gradients_from_one_length_to_the_next(
    mesh: DeviceMesh, case: Case
) -> None:
    actual = train_stages(case.folder, mesh, pipeline_class=_OneByOne)
    assert disagreements(actual, case.expected) == []


@pytest.mark.world(pp=2, dp=2)
def test_replicas_whose_gradients_are_not_reduced_are_detected(
    mesh: DeviceMesh, case: Case
) -> None:
    actual = train_stages(case.folder, mesh, divide=lambda stage, mesh: None)
    found = disagreements(actual, case.expected)
    assert "gradients of model.layers.0.mlp.down_proj.weight" in found
    assert "loss of step 0" not in found


# Mixed precision


# Measured: 1.2, and 195 if hidden states between stages lose half of their bits.
_LIMIT = 2.0


def _round_alike(stage: nn.Module, mesh: DeviceMesh) -> None:
    shard_parameters(stage, mesh["dp"], compute_dtype=torch.bfloat16)


def _largest_ratio(
    mesh: DeviceMesh, case: Case, noise: Record, change: Callable[[Stages], object]
) -> float:
    """Errors of gradients against float32, as multiples of those of one process in bfloat16."""
    actual = train_stages(
        case.folder,
        mesh,
        change=change,
        divide=_round_alike,
        pipeline_class=partial(Pipeline, hidden_dtype=torch.bfloat16),
    )
    everything: list[Any] = [None] * mesh.size()
    dist.all_gather_object(everything, actual.gradients)
    gradients = {name: value for of_rank in everything for name, value in of_rank.items()}
    found = ratios(gradients, noise.gradients, case.expected.gradients)
    return max(found.values())


@pytest.mark.long
@pytest.mark.world(pp=2, dp=2)
def test_stages_in_bfloat16_have_the_error_of_one_process(
    mesh: DeviceMesh, case: Case, expected_in_bfloat16: Record
) -> None:
    assert _largest_ratio(mesh, case, expected_in_bfloat16, lambda stages: None) < _LIMIT


def _round_what_travels(stages: Stages) -> None:
    """To 4 bits, where bfloat16 has 8."""
    if 0 in stages:
        stages[0].register_forward_hook(
            lambda module, _, output: output.to(torch.float8_e4m3fn).to(output.dtype)
        )


@pytest.mark.long
@pytest.mark.world(pp=2, dp=2)
def test_hidden_states_that_lose_more_bits_are_detected(
    mesh: DeviceMesh, case: Case, expected_in_bfloat16: Record
) -> None:
    assert _largest_ratio(mesh, case, expected_in_bfloat16, _round_what_travels) > _LIMIT


# Recomputation


def _recompute(stages: Stages) -> None:
    for stage in stages.values():
        model: Any = stage
        model.gradient_checkpointing_enable({"use_reentrant": False})
        assert model.is_gradient_checkpointing


def _recompute_something_else(stages: Stages) -> None:
    """From its second call on, a layer computes with another input."""
    _recompute(stages)
    for stage in stages.values():
        model: Any = stage
        for layer in model.model.layers:
            calls: list[int] = []

            def drift(_: nn.Module, output: torch.Tensor, calls: list[int]) -> torch.Tensor:
                calls.append(1)
                return output * (1.0 + 0.01 * (len(calls) % 2 == 0))

            layer.input_layernorm.register_forward_hook(
                lambda module, _, output, calls=calls: drift(module, output, calls)
            )


# Names that transformers 5.23 has replaced, and earlier versions have not.
quietly = pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing:FutureWarning")


@quietly
@pytest.mark.parametrize("case", ["llama", "mixtral"], indirect=True)
@pytest.mark.world(pp=2)
def test_stages_that_recompute_train_as_one_process(mesh: DeviceMesh, case: Case) -> None:
    actual = train_stages(case.folder, mesh, change=_recompute)
    assert disagreements(actual, case.expected) == []


@quietly
@pytest.mark.world(pp=2)
def test_recomputation_from_another_input_is_detected(mesh: DeviceMesh, case: Case) -> None:
    actual = train_stages(case.folder, mesh, change=_recompute_something_else)
    assert "gradients of model.layers.0.mlp.down_proj.weight" in disagreements(
        actual, case.expected
    )


# Adapters


def _add_adapters(stages: Stages) -> None:
    for index, stage in stages.items():
        stages[index] = add_lora(stage)


FROZEN = "base_model.model.model.layers.3.mlp.down_proj.lora_A.default.weight"


def _freeze_the_last(stages: Stages) -> None:
    _add_adapters(stages)
    if 1 in stages:
        stages[1].get_parameter(FROZEN).requires_grad_(False)


@pytest.mark.parametrize("case", ["llama", "granite-untied"], indirect=True)
@pytest.mark.world(pp=2)
def test_stages_with_adapters_train_as_one_process(mesh: DeviceMesh, case: Case) -> None:
    expected = train_alone(add_lora(load_whole(case.folder)))
    assert len(expected.gradients) == 2 * 2 * 4
    assert disagreements(train_stages(case.folder, mesh, change=_add_adapters), expected) == []


@pytest.mark.world(pp=2, dp=2)
def test_sharded_stages_with_adapters_train_as_one_process(mesh: DeviceMesh, case: Case) -> None:
    expected = train_alone(add_lora(load_whole(case.folder)))
    assert disagreements(train_stages(case.folder, mesh, change=_add_adapters), expected) == []


@pytest.mark.world(pp=2)
def test_adapter_that_is_frozen_on_one_stage_is_detected(mesh: DeviceMesh, case: Case) -> None:
    expected = train_alone(add_lora(load_whole(case.folder)))
    found = disagreements(train_stages(case.folder, mesh, change=_freeze_the_last), expected)
    assert {f"gradients of {FROZEN}: on no rank", f"updates of {FROZEN}"} <= {*found}
