from pathlib import Path

import pytest
import torch
from torch import nn

from assay.recording.session import capture
from assay.sites import CallSite
from assay.trace import Trace


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU())


def test_everything_that_runs_inside_is_recorded(tmp_path: Path) -> None:
    net = model()
    x = torch.ones(2, 3)
    with capture(net, tmp_path / "t"):
        expected = net(x)
        net(2 * x)

    trace = Trace.open(tmp_path / "t")
    assert trace.complete
    assert [call.site.module for call in trace.calls] == ["", "0", "1"] * 2
    call = trace.find(CallSite(0, ""))
    assert call is not None
    assert torch.equal(trace.tensor(call, "output"), expected)
    assert trace.manifest["model"] == "Sequential"


def test_statistics_take_the_place_of_tensors(tmp_path: Path) -> None:
    net = model()
    with capture(net, tmp_path / "t", stats_only=True):
        net(torch.ones(2, 3))

    ports = Trace.open(tmp_path / "t").calls[0].ports
    assert ports == ("input.input.statistics", "output.statistics")


def test_level_logits_records_the_model_and_none_of_its_modules(tmp_path: Path) -> None:
    net = model()
    with capture(net, tmp_path / "t", level="logits"):
        expected = net(torch.ones(2, 3))

    trace = Trace.open(tmp_path / "t")
    (call,) = trace.calls
    assert (call.site.module, call.ports) == ("", ("input.input", "output"))
    assert torch.equal(trace.tensor(call, "output"), expected)


def test_training_goes_on_as_if_nobody_watched(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = model()
    x = torch.ones(2, 3)
    net(x).sum().backward()
    weight = net[0].weight
    assert isinstance(weight.grad, torch.Tensor)
    expected = weight.grad.clone()
    net.zero_grad()
    with capture(net, tmp_path / "t"):
        net(x).sum().backward()

    assert torch.equal(weight.grad, expected)


def test_what_was_finished_before_an_exception_is_kept(tmp_path: Path) -> None:
    net = model()

    def run_and_fail() -> None:
        with capture(net, tmp_path / "t"):
            net(torch.ones(2, 3))
            raise KeyError

    with pytest.raises(KeyError):
        run_and_fail()

    assert len(Trace.open(tmp_path / "t").calls) == 3
