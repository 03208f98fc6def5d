"""Captures with the noise of another dtype, and with operations."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from assay.comparison.check import CompareOptions, compare_dumps
from assay.dumps.recognizing import open_dump
from assay.errors import UsageError
from assay.models import load_model
from assay.recording.capture import capture
from assay.runs import SilentProgress
from assay.trace import Trace
from assay.verdicts import Outcome, Verdict
from packages.core.tests.unit.recording.gated import Gated

IDS = torch.arange(3, 35).reshape(2, 16)


def generate(
    folder: Path, dtype: str, *, scale: float = 1.0, noise_for: str | None = None
) -> Tensor:
    model = load_model("micro:llama", dtype=dtype).model.eval()
    with capture(model, folder, noise_for=noise_for), torch.no_grad():
        model.get_parameter("model.layers.2.mlp.up_proj.weight").mul_(scale)
        tokens: Tensor = model.generate(IDS, max_new_tokens=4, do_sample=True)  # type: ignore[operator]
    return tokens


def judged(expected: Path, actual: Path) -> Verdict:
    sides = open_dump(str(expected)), open_dump(str(actual))
    return compare_dumps(CompareOptions("a", "b"), *sides, SilentProgress()).verdict


def test_recorded_noise_is_that_of_a_run_in_its_dtype(tmp_path: Path) -> None:
    drawn = []
    for folder, noise_for in ("golden", "bfloat16"), ("plain", None):
        torch.manual_seed(0)
        drawn.append(generate(tmp_path / folder, "float32", noise_for=noise_for))
    torch.manual_seed(0)
    generate(tmp_path / "right", "bfloat16")
    torch.manual_seed(0)
    generate(tmp_path / "wrong", "bfloat16", scale=1.05)

    assert torch.equal(*drawn), "the repeated passes drew random numbers of the script"
    right = judged(tmp_path / "golden", tmp_path / "right")
    assert right.verdict is Outcome.PASS
    # Same weights, same tokens, own caches: the errors are those of the noise run itself.
    assert right.levels["modules"].model_dump()["noise_ratio"] == pytest.approx(1.0, abs=0.01)
    assert any("the noise of bfloat16 that" in note for note in right.notes)
    wrong = judged(tmp_path / "golden", tmp_path / "wrong")
    assert wrong.location is not None
    assert wrong.location.module == "model.layers.2.mlp.up_proj"
    # Candidates in other dtypes are judged as before.
    assert not any(
        "the noise of" in note for note in judged(tmp_path / "plain", tmp_path / "golden").notes
    )


def test_noise_follows_the_weights_of_training(tmp_path: Path) -> None:
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=100.0)
    with capture(net, tmp_path / "t", noise_for="bfloat16"):
        for _ in range(2):
            net(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    (output,) = (
        one for one in open_dump(str(tmp_path / "t")).tensors
        if (one.site.port, one.site.at.step, one.site.at.phase) == ("output", 1, "forward")
    )  # fmt: skip
    error, norm, num_elements = output.noise["bfloat16"]
    assert 0 < error < 2**-7 * norm
    assert num_elements == 8


def test_noise_follows_weights_that_change_through_data(tmp_path: Path) -> None:
    net = nn.Linear(4, 4)
    with capture(net, tmp_path / "t", noise_for="bfloat16"), torch.no_grad():
        for _ in range(2):
            net(torch.ones(2, 4))
            net.weight.data.add_(1.0)  # torch counts no new version of the weight

    outputs = [one for one in open_dump(str(tmp_path / "t")).tensors if one.site.port == "output"]
    assert [one.site.at.step for one in outputs] == [0, 1]
    for output in outputs:
        error, norm, _ = output.noise["bfloat16"]
        assert error < 2**-7 * norm


class OnlyFloat32(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is not torch.float32:
            raise ValueError("no kernel")
        return x * self.weight


def test_a_model_that_cannot_run_in_a_dtype_is_recorded_without_its_noise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = OnlyFloat32()
    with capture(net, tmp_path / "t", noise_for="bfloat16"):
        for _ in range(2):
            net(torch.ones(2))

    assert capsys.readouterr().err.count("without the noise of bfloat16: no kernel") == 1
    assert len(Trace.open(tmp_path / "t").calls) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [({"noise_for": "int3"}, "noise_for='int3'"), ({"noise_for": "bfloat16", "stats_only": True}, "values")],
)  # fmt: skip
def test_noise_that_cannot_be_recorded_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        capture(nn.Linear(2, 2), tmp_path / "t", **options)


def test_level_op_records_the_operations_of_a_module(tmp_path: Path) -> None:
    net = Gated()
    with capture(net, tmp_path / "t", level="op"):
        net(torch.ones(2, 4)).sum().backward()

    trace = Trace.open(tmp_path / "t")
    ports = {
        call.site.module: [port for port in call.ports if port.startswith("op.")]
        for call in trace.calls
        if call.site.phase == "forward"
    }
    assert ports["up"] == ["op.0.linear.output"]
    assert ports[""] == ["op.0.mul.output"]


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(4, 8)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        up: Tensor = self.up(x)
        return torch.relu(up) * self.factor


def test_the_wrong_operation_is_named(tmp_path: Path) -> None:
    for folder, factor in ("expected", 2.0), ("actual", 2.1):
        net = Scaled(factor)
        with capture(net, tmp_path / folder, level="op"), torch.no_grad():
            net(torch.ones(2, 4))

    verdict = judged(tmp_path / "expected", tmp_path / "actual")
    assert verdict.location is not None
    assert (verdict.location.module, verdict.location.op) == ("", "mul")


def test_operations_of_a_compiled_model_are_refused(tmp_path: Path) -> None:
    net = torch.compile(Gated(), backend="eager")
    assert isinstance(net, nn.Module)
    with pytest.raises(UsageError, match="is compiled: level='op' records eager code"):
        capture(net, tmp_path / "t", level="op").start()


def test_noise_is_recorded_in_inference_mode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.inference_mode(), capture(model, tmp_path / "trace", noise_for="bfloat16"):
        model(torch.ones(2, 4))

    assert "without the noise" not in capsys.readouterr().err
    noise = {one.noise.get("bfloat16") for one in open_dump(tmp_path / "trace").tensors}
    assert None not in noise
