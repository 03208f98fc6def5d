from pathlib import Path

import torch

from assay.stages import Stage
from assay.trace import Trace, TraceWriter
from assay.training.replay.stage_values import StepValues, ValueAddress


def test_values_of_a_step_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    made = ValueAddress(Stage("a|b", "backward"), "gradient.weight", kind="Linear")
    left = ValueAddress(Stage("a|b", "reduce"), "gradient.weight")
    loss = ValueAddress(Stage("", "forward"), "loss", 1)
    tensors = {made: torch.ones(2), loss: torch.zeros(1, 1)}
    states = {"generator.0": torch.tensor([7]), "generator.1": torch.tensor([8])}
    with TraceWriter(tmp_path / "trace", {}) as writer:
        StepValues(dict(tensors), {left: made}, dict(states)).write(writer, 3)

    read = StepValues.read(Trace.open(tmp_path / "trace"), 3)

    assert read.addresses == (made, loss, left)
    assert read.unchanged == {left: made}
    assert all(torch.equal(read.stored[address], value) for address, value in tensors.items())
    assert all(torch.equal(read.states[name], state) for name, state in states.items())
