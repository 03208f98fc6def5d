"""What a training check needs, estimated before it loads a model."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from assay.devices.cpu import CpuDevice
from assay.devices.registry import open_run
from assay.devices.run_string import parse_run
from assay.errors import MachineError, UsageError
from assay.estimates import Speed, TrialCall
from assay.runs import SilentProgress
from assay.trace import Trace
from assay.training.batches import plan_batches
from assay.training.processes.reference import record_reference
from assay.training.processes.run_estimate import (
    TrainingSizes,
    _time_reference,
    require_resources,
)
from assay.training.replay.step_values import TRACE, StepValues
from assay.training.reports import TrainCheck, TrainOptions

OPTIONS = TrainOptions(model="micro:llama?trained=0", steps=2, resume_at=1)


class Noted(SilentProgress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def request(
    folder: Path, options: dict[str, Any] | None = None, max_disk: int | None = 10**9
) -> TrainCheck:
    return TrainCheck(
        OPTIONS.model_copy(update=options or {}),
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
    require_resources(wanted, plan_batches(wanted.options), device, "float64", progress)


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

    monkeypatch.setattr("assay.training.processes.run_estimate.add_lora", refuse)

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
    monkeypatch.setattr("assay.training.processes.run_estimate.SMALL_MODEL_PARAMETERS", 0)

    plan(unlimited, progress)
    assert ["cannot be estimated" in note for note in progress.notes] == [True]
