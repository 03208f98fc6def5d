"""Calls that only learn shapes are not recorded."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B

from assay.dumps.recognizing import open_dump
from assay.recording.capture import capture
from assay.trace import Trace

INPUTS = torch.arange(12.0).reshape(6, 2)
NUM_MICRO_BATCHES = 3


@pytest.fixture
def process_group() -> Iterator[None]:
    store: Any = getattr(dist, "HashStore")()  # noqa: B009 - torch does not export it to mypy
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def one_stage(parts: list[nn.Linear]) -> Any:
    stage = PipelineStage(nn.Sequential(*parts), 0, 1, torch.device("cpu"))
    return ScheduleGPipe(stage, NUM_MICRO_BATCHES, loss_fn=loss_of)


def two_stages(parts: list[nn.Linear]) -> Any:
    stages: list[Any] = [
        PipelineStage(part, i, 2, torch.device("cpu")) for i, part in enumerate(parts)
    ]
    return ScheduleInterleaved1F1B(stages, NUM_MICRO_BATCHES, loss_fn=loss_of)


def evaluation(parts: list[nn.Linear]) -> Any:
    stage = PipelineStage(nn.Sequential(*parts), 0, 1, torch.device("cpu"))
    return ScheduleGPipe(stage, NUM_MICRO_BATCHES)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("make", [one_stage, two_stages, evaluation])
def test_a_pipeline_records_each_micro_batch_once(
    tmp_path: Path, make: Callable[[list[nn.Linear]], Any]
) -> None:
    parts = [nn.Linear(2, 2), nn.Linear(2, 2)]
    schedule = make(parts)
    stage = schedule._stages[1] if make is two_stages else schedule._stage
    targets = {} if make is evaluation else {"target": torch.ones(6, 2)}
    with capture(stage.submod, tmp_path / "t"):
        outputs = [schedule.step(INPUTS, **targets) for _ in range(2)]

    trace = Trace.open(tmp_path / "t")
    roots = [call for call in trace.calls if not call.site.module]
    recorded = [trace.tensor(call, "output") for call in roots if call.site.phase == "forward"]
    assert len(recorded) == 2 * NUM_MICRO_BATCHES
    assert torch.equal(torch.cat(recorded[-NUM_MICRO_BATCHES:]), outputs[1])
    assert len(roots) - len(recorded) == (0 if make is evaluation else 2 * NUM_MICRO_BATCHES)
    assert trace.manifest["dry_runs"] == "calls that learn shapes only, not recorded: 1"
    assert not open_dump(tmp_path / "t").problems


def call_with_fake_tensors(net: nn.Module) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        net(mode.from_tensor(INPUTS))


def export(net: nn.Module) -> None:
    torch.export.export(net, (INPUTS,), strict=False)


def call_on_the_meta_device(net: nn.Module) -> None:
    parameters = {name: one.to("meta") for name, one in net.named_parameters()}
    torch.func.functional_call(net, parameters, INPUTS.to("meta"))


@pytest.mark.parametrize("learn", [call_with_fake_tensors, export, call_on_the_meta_device])
def test_calls_without_values_are_not_recorded(
    tmp_path: Path, learn: Callable[[nn.Module], None]
) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).eval()
    with capture(net, tmp_path / "t"), torch.no_grad():
        net(INPUTS)
        learn(net)
        net(2 * INPUTS)

    trace = Trace.open(tmp_path / "t")
    assert [(call.site.step, call.site.module) for call in trace.calls] == [
        (step, path) for step in (0, 1) for path in ("", "0", "1")
    ]
    assert trace.manifest["dry_runs"] == "calls that learn shapes only, not recorded: 1"
    assert not open_dump(tmp_path / "t").problems
