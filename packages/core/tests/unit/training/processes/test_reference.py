"""The trusted process: AdamW in float32 against a golden in float64, and the estimate before anything is loaded."""

import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from assay.devices.cpu import CpuDevice
from assay.devices.registry import open_run
from assay.devices.run_string import parse_run
from assay.errors import MachineError, UsageError
from assay.estimates import Speed, TrialCall
from assay.hooks.tensors import Boundary
from assay.runs import SilentProgress
from assay.stages import Stage
from assay.trace import Trace, TraceWriter
from assay.training.batches import plan_batches
from assay.training.check import options_for
from assay.training.processes import reference
from assay.training.processes.reference import (
    TrainingSizes,
    _list_tried,
    _time_reference,
    measure_adamw,
    record_reference,
    require_resources,
    trusted_trainer,
)
from assay.training.protocol import OtherSetting
from assay.training.replay.parameter_watch import observe_update
from assay.training.replay.step_values import (
    TRACE,
    RunRows,
    StageRecorder,
    StepValues,
    ValueAddress,
)
from assay.training.reports import TrainCheck, TrainOptions
from assay.training.state.files import state_file, write_state
from assay.training.state.parameters import NamedParameter

BOUNDARY = Boundary.exact_inputs_for(torch.bfloat16)
OPTIONS = TrainOptions(model="micro:llama", steps=2, resume_at=1, learning_rate=1e-2)
UNIT = 2.0**-24


def rounded(value: Tensor) -> Tensor:
    return value.bfloat16().to(value.dtype)


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """Two steps of one weight by AdamW in float64, each from a state that bfloat16 can hold."""
    torch.manual_seed(0)
    weight = nn.Parameter(rounded(torch.randn(8, 16, dtype=torch.float64)))
    item = NamedParameter("norm.weight", "norm", "", weight)
    optimizer = torch.optim.AdamW([weight], lr=OPTIONS.learning_rate)
    with TraceWriter(tmp_path / TRACE, {}) as writer:
        handler = StageRecorder(writer, BOUNDARY)
        for step in range(OPTIONS.steps):
            moments = {
                name: value if value.ndim == 0 else rounded(value)
                for name, value in optimizer.state[weight].items()
            }
            state = {"model": {"norm.weight": weight.detach()}, "trainable": ["norm.weight"]}
            kept = {"norm.weight": moments} if moments else {}
            write_state(state_file(tmp_path, step), state | {"moments": kept, "generators": {}})
            optimizer.state[weight].update(moments)
            handler.begin_step(step)
            address = ValueAddress(Stage("norm", "clip"), "gradient.weight")
            weight.grad = handler.observe(address, torch.randn(8, 16, dtype=torch.float64))
            before = weight.detach().clone()
            optimizer.step()
            observe_update(handler, item, weight.detach() - before, optimizer.state[weight])
            handler.end_step()
            weight.data = rounded(weight.data)
    return tmp_path


def test_step_in_float32_is_off_by_the_rounding_of_float32(golden: Path) -> None:
    rows = RunRows.of_counts([[2], [2]])

    results = measure_adamw(golden, OPTIONS, rows, "bfloat16", "float32")

    errors = {port: result.sums.relative_error for (_, port), result in results.ports.items()}
    assert errors.keys() == {
        "update.weight", "exp_avg.weight", "exp_avg_sq.weight", "count-step.weight"
    }  # fmt: skip
    assert errors["exp_avg.weight"] < 4 * UNIT
    assert errors["exp_avg_sq.weight"] < 4 * UNIT
    # An update of about 0.01 is a difference of weights of about 1: a hundred times their rounding.
    assert UNIT < errors["update.weight"] < 400 * UNIT
    assert results.ports["norm", "count-step.weight"].exact.num_different == 0
    assert {result.dtype for result in results.ports.values()} >= {"float32"}


@pytest.mark.parametrize(("parameters", "moves"), [("norm*", True), ("*bias", None)])
def test_another_weight_decay_moves_the_update_of_its_parameters(
    golden: Path, parameters: str, *, moves: bool | None
) -> None:
    rows = RunRows.of_counts([[2], [2]])
    options = OPTIONS.model_copy(update={"parameter_groups": {parameters: {"weight_decay": 0.01}}})
    errors = []
    for decay in (0.01, 1.0):
        other = OtherSetting(parameters, "weight_decay", decay)
        results = measure_adamw(golden, options, rows, "bfloat16", "float32", other)
        port = results.ports.get(("norm", "update.weight"))
        errors.append(None if port is None else port.sums.relative_error)
    # A decay of the learning rate times weights of about 1, beside updates of the learning rate.
    assert errors == (
        [pytest.approx(0, abs=1e-4), pytest.approx(1, rel=0.5)] if moves else [None] * 2
    )


def test_of_a_large_model_one_parameter_of_each_kind_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reference, "_MOST_TRIED", 8)
    model = {"0.a": torch.zeros(8), "1.a": torch.zeros(8), "b": torch.zeros(9), "c": torch.zeros(2)}
    tried = partial(_list_tried, model)
    assert sorted(tried(model, OtherSetting("*", "eps", 1.0))) == ["0.a", "c"]
    assert tried(model, OtherSetting("[bc]", "eps", 1.0)) == ["c"]
    assert tried(model, OtherSetting("b", "eps", 1.0)) == ["b"]
    assert tried(model, OtherSetting("c", "eps", 1.0)) == ["c"]
    assert tried(model, OtherSetting("none", "eps", 1.0)) == []


def scale_of(features: tuple[str, ...]) -> float:
    """By which the yardstick for a candidate in bfloat16 multiplies embeddings of 96 features."""
    options = options_for(TrainOptions(model="micro:gemma2"), {}, features)
    trainer = trusted_trainer(options, "bfloat16", "float64")
    trainer.setup(options.plan("cpu/float64"))
    scale = trainer.model.get_buffer("model.embed_tokens.embed_scale")
    return float(scale)


def test_buffers_of_the_yardstick_are_the_candidates() -> None:
    assert scale_of(()) == float(torch.tensor(math.sqrt(96)).bfloat16())
    assert scale_of(("mixed-precision",)) == pytest.approx(math.sqrt(96), rel=1e-7)


@pytest.mark.parametrize(
    ("features", "expected"), [((), torch.float32), (("mixed-precision",), torch.bfloat16)]
)
def test_adapters_of_the_noise_run_compute_as_the_candidates(
    features: tuple[str, ...], expected: torch.dtype
) -> None:
    options = options_for(TrainOptions(model="micro:llama", lora=True), {}, features)
    trainer = trusted_trainer(options, "bfloat16", None)
    trainer.setup(options.plan("cpu/bfloat16"))
    adapter = trainer.model.get_submodule(
        "base_model.model.model.layers.0.mlp.down_proj.lora_A.default"
    )
    assert isinstance(adapter, nn.Linear)
    with trainer.computing():
        output = adapter(torch.ones(1, adapter.in_features))

    assert (adapter.weight.dtype, output.dtype) == (torch.float32, expected)


UNTRAINED_OPTIONS = TrainOptions(model="micro:llama?trained=0", steps=2, resume_at=1)


class Noted(SilentProgress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def request(
    folder: Path, options: dict[str, Any] | None = None, max_disk: int | None = 10**9
) -> TrainCheck:
    return TrainCheck(
        UNTRAINED_OPTIONS.model_copy(update=options or {}),
        "cpu/float32",
        "cpu/bfloat16",
        golden=folder,
        folder=folder,
        max_disk=max_disk,
    )


def sizes_of(wanted: TrainCheck) -> TrainingSizes:
    return TrainingSizes.of(wanted, plan_batches(wanted.options), "float64")


def plan(wanted: TrainCheck, progress: SilentProgress) -> None:
    device = open_run(parse_run(wanted.reference))
    require_resources(wanted, device, "float64", progress)


@pytest.mark.parametrize(
    "options",
    [{}, {"lora": True}, {"model": "micro:mixtral?trained=0"}],
    ids=["all", "lora", "experts"],
)
def test_estimated_disk_is_that_of_the_golden(options: dict[str, Any], tmp_path: Path) -> None:
    wanted = request(tmp_path, options)
    golden = sizes_of(wanted).golden_bytes
    record_reference(wanted, SilentProgress())

    written = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert written / 1.5 < golden < written * 1.5
    values = StepValues.read(Trace.open(tmp_path / TRACE), 1)
    stored = {(one.stage.phase, one.port.partition(".")[0]) for one in values.stored}
    assert ("backward", "gradient") in stored
    left_out = {
        ("clip", "gradient"),
        *(("optimizer", what) for what in ("update", "exp_avg", "exp_avg_sq")),
    }
    assert not stored & left_out
    assert {one.stage.phase for one in values.computed} == {"optimizer"}


def test_needs_are_noted_with_the_time_of_the_reference(tmp_path: Path) -> None:
    progress = Noted()
    plan(request(tmp_path), progress)

    (note,) = progress.notes
    assert note.startswith("the reference needs about ")
    assert re.search(
        r"GB of memory, and the check ([5-9]|1[0-4])\d\.\d MB of disk; the reference takes about \d+ s$",
        note,
    )


def test_more_steps_need_more_disk_and_time_and_an_adapter_has_a_smaller_state(
    tmp_path: Path,
) -> None:
    trial = TrialCall(1e5, 1e4, 10)
    some, more, adapter = (
        replace(sizes_of(request(tmp_path, options)), trial=trial)
        for options in (dict[str, Any](), {"steps": 4}, {"lora": True})
    )
    speed, slow = Speed(weight=1e-9, product=1e-11), Speed(weight=1e-8, product=1e-9)

    assert more.golden_bytes > 1.5 * some.golden_bytes
    assert adapter.state_bytes < some.state_bytes
    assert _time_reference(more, speed, speed) > 1.5 * _time_reference(some, speed, speed)
    extra = 3 * (
        trial.seconds(slow, len(some.tokens), sum(some.tokens))
        - trial.seconds(speed, len(some.tokens), sum(some.tokens))
    )
    assert _time_reference(some, slow, speed) - _time_reference(
        some, speed, speed
    ) == pytest.approx(extra)


def test_golden_beyond_the_allowed_disk_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        MachineError, match=r"needs about .* --disk allows 1\.0 kB\. Use fewer --steps"
    ):
        record_reference(request(tmp_path, max_disk=1000), SilentProgress())

    assert list(tmp_path.iterdir()) == []


def test_model_beyond_the_free_memory_is_refused_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDevice, "free_memory_bytes", lambda _: 5 * 10**8)

    with pytest.raises(MachineError, match=r"GB of memory, but cpu/float32 has 500\.0 MB free"):
        plan(request(tmp_path), SilentProgress())


def test_error_of_the_model_is_not_one_of_the_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise UsageError("no linear layers to adapt")

    monkeypatch.setattr("assay.training.processes.reference.add_lora", refuse)

    with pytest.raises(UsageError, match="no linear layers"):
        plan(request(tmp_path, {"lora": True}), SilentProgress())


def test_results_of_a_reference_on_a_device_are_stored(tmp_path: Path) -> None:
    host = sizes_of(request(tmp_path))
    device = replace(host, on_host=False)

    assert device.golden_bytes - host.golden_bytes == 2 * 3 * 4 * host.num_trained


def test_model_that_cannot_be_estimated_is_noted_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def needs_values(*_: object) -> TrialCall:
        raise RuntimeError("no values on meta")

    monkeypatch.setattr(TrialCall, "of", needs_values)
    with pytest.raises(MachineError, match="--disk: time, memory and disk cannot be estimated"):
        plan(request(tmp_path), SilentProgress())
    progress, unlimited = Noted(), request(tmp_path, max_disk=None)
    monkeypatch.setattr("assay.training.processes.reference.SMALL_MODEL_PARAMETERS", 0)

    plan(unlimited, progress)
    assert ["cannot be estimated" in note for note in progress.notes] == [True]
