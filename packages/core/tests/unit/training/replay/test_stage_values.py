from pathlib import Path

import pytest
import torch

from assay.stages import Stage
from assay.trace import Trace, TraceWriter
from assay.training.replay import stage_values
from assay.training.replay.stage_values import StepValues, StepWriter, ValueAddress


@pytest.mark.parametrize("part_bytes", [1, 1 << 20])
def test_values_of_a_step_are_read_back_as_they_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    monkeypatch.setattr(stage_values, "_PART_BYTES", part_bytes)
    made = ValueAddress(Stage("a|b", "backward"), "gradient.weight", kind="Linear")
    left = ValueAddress(Stage("a|b", "reduce"), "gradient.weight")
    loss = ValueAddress(Stage("", "forward"), "loss", 1)
    tensors = {made: torch.ones(2), loss: torch.zeros(1, 1)}
    states = {"generator.0": torch.tensor([7]), "generator.1": torch.tensor([8])}
    with TraceWriter(tmp_path / "trace", {}) as writer:
        step = StepWriter(writer, 3)
        for address, value in tensors.items():
            step.store(address, value)
        step.scale(left, made, 1)
        for name, state in states.items():
            step.store_state(name, state)
        step.finish()

    read = StepValues.read(Trace.open(tmp_path / "trace"), 3)

    assert read.addresses == (made, loss, left)
    assert read.scaled == {left: (made, 1)}
    assert all(torch.equal(read.stored[address], value) for address, value in tensors.items())
    assert all(torch.equal(read.states[name], state) for name, state in states.items())
