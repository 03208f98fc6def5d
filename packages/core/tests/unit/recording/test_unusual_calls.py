"""Captures of models that are wrapped, compiled, or called in several threads."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from assay.comparison.check import CompareOptions, compare_dumps
from assay.dumps.recognizing import open_dump
from assay.recording.capture import capture
from assay.runs import SilentProgress
from assay.trace import Trace
from assay.verdicts import Outcome, Verdict


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


PATHS = ["", "layers.0", "layers.1"]


def judged(expected: Path, actual: Path) -> Verdict:
    sides = open_dump(str(expected)), open_dump(str(actual))
    return compare_dumps(CompareOptions("a", "b"), *sides, SilentProgress()).verdict


class Meeting(Net):
    """Calls itself in another thread while it is called."""

    def forward(self, hidden: Tensor) -> Tensor:
        if len(hidden) == 1:
            thread = Thread(target=self, args=(hidden.expand(2, -1),))
            thread.start()
            thread.join()
        return super().forward(hidden)


@pytest.fixture
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("assay.hooks.module_tracer.PATIENCE_SECONDS", 0.05)


@pytest.mark.usefixtures("impatience")
def test_left_out_concurrent_calls_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = Meeting().eval()
    with capture(net, tmp_path / "t"):
        net(torch.ones(1, 4))

    text = (
        f"{tmp_path / 't'}: left out 3 module calls, which were made in a second thread or recorded"
        " into a device graph"
    )
    assert f"assay: {text}\n" in capsys.readouterr().err
    assert open_dump(str(tmp_path / "t")).problems == [text]
    assert [call.site.module for call in Trace.open(tmp_path / "t").calls] == PATHS


class Outliving(Net):
    """Starts a call of itself in another thread, which ends after its own call."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun, self.has_ended = Event(), Event()
        self.thread = Thread(target=self, args=(torch.ones(2, 4),))

    def forward(self, hidden: Tensor) -> Tensor:
        if len(hidden) == 1:
            self.thread.start()
            self.has_begun.wait()
        else:
            self.has_begun.set()
            self.has_ended.wait()
        return super().forward(hidden)


@pytest.mark.usefixtures("impatience")
def test_calls_inside_of_a_left_out_call_are_left_out_after_the_other_call(tmp_path: Path) -> None:
    net = Outliving().eval()
    with capture(net, tmp_path / "t"):
        net(torch.ones(1, 4))
        net.has_ended.set()
        net.thread.join()
        net(torch.ones(3, 4))

    calls = Trace.open(tmp_path / "t").calls
    assert [(call.site.step, call.site.module) for call in calls] == [
        (step, path) for step in (0, 1) for path in PATHS
    ]
    (problem,) = open_dump(str(tmp_path / "t")).problems
    assert "left out 3 module calls" in problem


class Parallel(nn.Module):
    """Calls its model on each row in a thread of its own, as DataParallel does on each device."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Net()

    def forward(self, hidden: Tensor) -> Tensor:
        with ThreadPoolExecutor(2) as pool:
            return torch.stack(list(pool.map(self.module, hidden)))


@pytest.mark.usefixtures("impatience")
def test_calls_in_threads_of_a_call_forbid_a_pass(tmp_path: Path) -> None:
    net = Parallel().eval()
    with capture(net, tmp_path / "t"), torch.no_grad():
        net(torch.ones(2, 4))

    assert [call.site.module for call in Trace.open(tmp_path / "t").calls] == [""]
    verdict = judged(tmp_path / "t", tmp_path / "t")
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert "left out 6 module calls" in str(verdict.levels["completeness"].reason)


def test_concurrent_calls_wait_for_one_another(tmp_path: Path) -> None:
    net = Net().eval()
    with capture(net, tmp_path / "t"), ThreadPoolExecutor(4) as pool:
        list(pool.map(net, 8 * [torch.ones(1, 4)]))

    trace = Trace.open(tmp_path / "t")
    assert [call.site.module for call in trace.calls] == 8 * PATHS
    assert not open_dump(str(tmp_path / "t")).problems


def test_successive_calls_in_different_threads_are_recorded(tmp_path: Path) -> None:
    net = Net().eval()
    with capture(net, tmp_path / "t"), ThreadPoolExecutor(1) as pool:
        with pytest.raises(RuntimeError):
            net(torch.ones(1, 99))
        pool.submit(net, torch.ones(1, 4)).result()
        net(torch.ones(1, 4))

    trace = Trace.open(tmp_path / "t")
    assert [call.site.module for call in trace.calls] == 2 * PATHS
    assert not open_dump(str(tmp_path / "t")).problems


def test_left_out_calls_of_a_device_graph_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_recording = False
    device = SimpleNamespace(is_current_stream_capturing=lambda: is_recording)
    monkeypatch.setattr(torch, "get_device_module", lambda: device)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    net = Net().eval()
    with capture(net, tmp_path / "t"):
        net(torch.ones(1, 4))
        is_recording = True
        net(torch.ones(1, 4))

    (problem,) = open_dump(str(tmp_path / "t")).problems
    assert "left out 3 module calls" in problem
    assert [call.site.module for call in Trace.open(tmp_path / "t").calls] == PATHS


class Wrapper(nn.Module):
    """Has the model under the name that DistributedDataParallel gives it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.module(hidden)
        return output


def test_calls_around_a_wrapper_are_those_of_the_model(tmp_path: Path) -> None:
    net = Wrapper(Net()).eval()
    with capture(net, tmp_path / "t"):
        for called in (net, net.module):
            called(torch.ones(1, 4))

    calls = Trace.open(tmp_path / "t").calls
    assert [call.site.module for call in calls] == 2 * PATHS
    assert [call.site.step for call in calls] == 3 * [0] + 3 * [1]
    assert [call.caller for call in calls] == 2 * [None, "", ""]


def compile_model(net: Net, **options: Any) -> Any:
    return torch.compile(net, backend="aot_eager", **options)


def compile_in_place(net: Net, **options: Any) -> Any:
    net.compile(backend="aot_eager", **options)
    return net


def compile_layers(net: Net, **options: Any) -> Any:
    for layer in net.layers:
        layer.compile(backend="aot_eager", **options)
    return net


def compile_forward(net: Net, **options: Any) -> Any:
    forward: Any = torch.compile(net.forward, backend="aot_eager", **options)
    net.forward = forward  # type: ignore[method-assign]
    return net


def train(net: nn.Module) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for scale in (1, 2):
        net(scale * torch.ones(3, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


# torch.compile looks at tensors between two graphs.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    "compiled", [compile_model, compile_in_place, compile_layers, compile_forward]
)
def test_compiled_models_are_captured(tmp_path: Path, compiled: Callable[..., nn.Module]) -> None:
    for name, scale in (("eager", 1.0), ("compiled", 1.0), ("fault", 1.02)):
        net = Net()
        net.layers[1].register_forward_hook(lambda _m, _a, output, s=scale: output * s)
        model = net if name == "eager" else compiled(net)
        with capture(model, tmp_path / name):
            train(model)

    assert judged(tmp_path / "eager", tmp_path / "compiled").verdict is Outcome.PASS
    location = judged(tmp_path / "eager", tmp_path / "fault").location
    assert location is not None
    assert location.module == "layers.1"


@pytest.mark.parametrize(
    "compiled", [compile_model, compile_in_place, compile_layers, compile_forward]
)
def test_a_model_in_a_whole_graph_runs_and_its_inner_modules_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], compiled: Callable[..., nn.Module]
) -> None:
    torch.manual_seed(0)
    net = Net().eval()
    with torch.no_grad():
        expected = net(torch.ones(1, 4))
        model = compiled(net, fullgraph=True)
        with capture(model, tmp_path / "t"):
            assert torch.equal(model(torch.ones(1, 4)), expected)

    recorded = [call.site.module for call in Trace.open(tmp_path / "t").calls]
    if compiled is compile_layers:  # each one is a whole graph without inner modules
        assert recorded == PATHS
        return
    assert recorded == [""]
    (problem,) = open_dump(str(tmp_path / "t")).problems
    assert problem == (
        f"{tmp_path / 't'}: left out calls in code compiled with fullgraph=True: layers.0, layers.1"
    )
    assert f"assay: {problem}\n" in capsys.readouterr().err


class Partly(nn.Module):
    """Runs one part in one graph."""

    def __init__(self, run: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        super().__init__()
        self.part, self.head = Net(), nn.Linear(4, 2)
        self.run = run(self.part)

    def forward(self, hidden: Tensor) -> Any:
        return self.head(self.run(hidden))


def compile_whole(part: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(lambda hidden: part(hidden) + 1, fullgraph=True, backend="aot_eager")


def forbid_breaks(part: Callable[..., Any]) -> Callable[..., Any]:
    def run(hidden: Tensor) -> Any:
        with torch._dynamo.error_on_graph_break(True):
            return part(hidden) + 1

    return torch.compile(run, backend="aot_eager")


@pytest.mark.parametrize("run", [compile_whole, forbid_breaks])
def test_code_in_a_whole_graph_runs_and_is_reported(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    run: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    net = Partly(run).eval()
    with torch.no_grad():
        expected = net(torch.ones(1, 4))
        with capture(net, tmp_path / "t"):
            assert torch.equal(net(torch.ones(1, 4)), expected)

    problem = (
        f"{tmp_path / 't'}: left out calls in code compiled with fullgraph=True: part, part.layers.0,"
        " part.layers.1"
    )
    assert [call.site.module for call in Trace.open(tmp_path / "t").calls] == ["", "head"]
    assert open_dump(str(tmp_path / "t")).problems == [problem]
    assert f"assay: {problem}\n" in capsys.readouterr().err


def test_modules_that_are_not_recorded_are_not_missed_in_a_whole_graph(tmp_path: Path) -> None:
    net = Partly(compile_whole).eval()
    with torch.no_grad(), capture(net, tmp_path / "t", exclude=("part*",)):
        net(torch.ones(1, 4))

    assert not open_dump(str(tmp_path / "t")).problems


class ScaledInPlace(Net):
    """Scales a value in place between two layers."""

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.layers[0](hidden)
        hidden *= 3
        return self.layers[1](hidden)  # type: ignore[no-any-return]


def test_a_change_in_place_is_seen_in_inference_mode(tmp_path: Path) -> None:
    """vLLM 0.32 runs in inference mode, and scales the embeddings of Granite in place."""
    model, given = ScaledInPlace(), torch.ones(2, 4)
    with torch.inference_mode(), capture(model, tmp_path / "trace"):
        model(given)
    trace = Trace.open(tmp_path / "trace")

    ports = {call.site.module: call for call in trace.calls}
    before = trace.tensor(ports["layers.0"], "output")
    after = trace.tensor(ports["layers.1"], "input.input")
    assert torch.equal(after, 3 * before)
