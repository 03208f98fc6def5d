"""The captures that start in a process of a captured command, without a process of their own."""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from assay.dumps.recognizing import open_dump
from assay.errors import UsageError
from assay.recording import attached_process
from assay.recording.attached_process import CaptureSettings, ModelWatcher
from assay.trace import Trace

Ends = list[Callable[[], None]]
Watch = Callable[..., Ends]


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Watch the models of this process; call each result to end a capture, as at exit."""
    (tmp_path / "notes").mkdir()

    def start(min_parameters: int = 1, model_name: str | None = None) -> Ends:
        ends: Ends = []

        def at_exit(_capture: object) -> Callable[..., object]:
            return lambda finish, capture: ends.append(partial(finish, capture))

        monkeypatch.setattr(attached_process, "_at_exit", at_exit)
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)
        monkeypatch.setattr(nn.Module, "__call__", nn.Module.__call__)
        output, notes = str(tmp_path / "t"), str(tmp_path / "notes")
        settings = CaptureSettings(output, notes, min_parameters, model_name, {})
        ModelWatcher(settings).install(torch.nn.modules.module)
        return ends

    yield start
    monkeypatch.undo()


def noted(folder: Path) -> list[tuple[str, str]]:
    lines = [
        line for file in (folder / "notes").iterdir() for line in file.read_text().splitlines()
    ]
    return [(kind, text) for kind, text in map(json.loads, lines)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


NUM_CALLS = 6


def call_in_threads(net: nn.Module) -> None:
    threads = [Thread(target=net, args=(torch.full((1, 4), float(i)),)) for i in range(NUM_CALLS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def call_in_a_pool(net: nn.Module) -> None:
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(net, [torch.full((1, 4), float(i)) for i in range(NUM_CALLS)]))


def call_in_threads_of_a_loop(net: nn.Module) -> None:
    async def gather() -> None:
        inputs = [torch.full((1, 4), float(i)) for i in range(NUM_CALLS)]
        await asyncio.gather(*(asyncio.to_thread(net, one) for one in inputs))

    asyncio.run(gather())


def call_in_threads_that_started_before(net: nn.Module) -> None:
    barrier = Barrier(NUM_CALLS)

    def work(number: int) -> None:
        barrier.wait()
        net(torch.full((1, 4), float(number)))

    threads = [Thread(target=work, args=(i,)) for i in range(NUM_CALLS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(
    "call",
    [
        call_in_threads,
        call_in_a_pool,
        call_in_threads_of_a_loop,
        call_in_threads_that_started_before,
    ],
)
def test_every_call_of_every_thread_is_recorded(
    watch: Watch, tmp_path: Path, call: Callable[[nn.Module], None]
) -> None:
    ends = watch()
    with torch.no_grad():
        call(Net().eval())
    for end in ends:
        end()

    trace = Trace.open(tmp_path / "t")
    assert Counter(call.site.module for call in trace.calls) == {
        "": NUM_CALLS,
        "layers.0": NUM_CALLS,
        "layers.1": NUM_CALLS,
    }
    roots = [call for call in trace.calls if not call.site.module]
    inputs = {float(trace.tensor(call, "input.hidden")[0, 0]) for call in roots}
    assert inputs == set(range(NUM_CALLS))
    assert not open_dump(tmp_path / "t").problems


def test_the_models_of_a_process_are_named_by_order_and_class(watch: Watch, tmp_path: Path) -> None:
    teacher, student = Net(), Net()
    ends = watch()
    for _ in range(2):
        teacher(torch.ones(1, 4))
        student(torch.zeros(1, 4))
    for end in ends:
        end()

    second = str(tmp_path / "t" / "2-Net")
    assert noted(tmp_path) == [
        ("begun", str(tmp_path / "t")), ("begun", second),
        ("ended", str(tmp_path / "t")), ("ended", second),
    ]  # fmt: skip
    problem = f"{tmp_path / 't'}: compare each model: --model-name 1-Net, 2-Net"
    assert open_dump(tmp_path / "t").problems == [problem]
    for name, value in (("1-Net", 1.0), ("2-Net", 0.0)):
        dump = open_dump(tmp_path / "t", model_name=name)
        given = next(one for one in dump.tensors if one.site.port == "input.hidden")
        assert not dump.problems
        assert given.read().unique().tolist() == [value]
    with pytest.raises(UsageError, match=r"Net names none or several in .*: 1-Net, 2-Net"):
        open_dump(tmp_path / "t", model_name="Net")


@pytest.mark.parametrize(("name", "value"), [("2-Net", 0.0), ("Net", 1.0)])
def test_only_the_chosen_model_is_captured(
    watch: Watch, tmp_path: Path, name: str, value: float
) -> None:
    ends = watch(model_name=name)
    other = nn.Linear(4, 4) if name == "Net" else Net()
    other(torch.ones(1, 4))
    Net()(torch.full((1, 4), value))
    for end in ends:
        end()

    trace = Trace.open(tmp_path / "t")
    assert trace.tensor(trace.calls[0], "input.hidden").unique().tolist() == [value]
    assert len(ends) == 1


class Facade(nn.Module):
    """Calls a model that it has not registered."""

    def __init__(self) -> None:
        super().__init__()
        self.models = [Net()]

    def forward(self, hidden: Tensor) -> Any:
        return self.models[0](hidden)


def test_a_model_inside_of_a_module_without_parameters_is_captured(
    watch: Watch, tmp_path: Path
) -> None:
    ends = watch()
    facade = Facade()
    facade(torch.ones(1, 4))
    facade(torch.ones(1, 4))
    for end in ends:
        end()

    modules = [call.site.module for call in Trace.open(tmp_path / "t").calls]
    assert modules == 2 * ["", "layers.0", "layers.1"]


def test_a_lazy_model_is_captured_from_its_first_call(watch: Watch, tmp_path: Path) -> None:
    ends = watch(min_parameters=8)
    nn.Sequential(nn.LazyLinear(4))(torch.ones(1, 4))
    for end in ends:
        end()

    assert [call.site.module for call in Trace.open(tmp_path / "t").calls] == ["", "0"]


def test_an_error_of_the_capture_does_not_stop_the_script(
    watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object, **_options: object) -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr("assay.recording.capture.capture.__class__.__call__", fail)
    ends = watch()
    assert Net()(torch.ones(1, 4)).shape == (1, 4)
    assert noted(tmp_path) == [("problem", "Net was not captured: no such thing")]
    assert not ends


class Deep(nn.Module):
    """More layers of a class, and more classes, than torch.compile compiles one function for."""

    def __init__(self) -> None:
        super().__init__()
        kinds = nn.ReLU, nn.Tanh, nn.GELU, nn.SiLU, nn.ELU, nn.CELU, nn.SELU, nn.Mish, nn.Sigmoid
        self.layers = nn.ModuleList(
            layer for kind in kinds for layer in (nn.Linear(4, 4), Counting(), kind())
        )

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Counting(nn.Module):
    num = iter(range(100))

    def __init__(self) -> None:
        super().__init__()
        self.number = next(self.num)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.number


def test_a_compiled_model_is_compiled_once_for_each_module(watch: Watch, tmp_path: Path) -> None:
    ends = watch()
    net: Any = torch.compile(Deep().eval(), backend="eager")
    with torch.no_grad(), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        net(torch.ones(1, 4))
        net(torch.ones(1, 4))
    for end in ends:
        end()

    assert len(Trace.open(tmp_path / "t").calls) == 2 * (1 + 27)


def test_a_model_that_only_a_whole_graph_calls_is_left_to_it(watch: Watch, tmp_path: Path) -> None:
    ends = watch()
    net = Net().eval()
    step = torch.compile(lambda hidden: net(hidden) + 1, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.equal(
            step(torch.ones(1, 4)), net.layers[1](net.layers[0](torch.ones(1, 4))) + 1
        )
    for end in ends:  # of the two layers
        end()
    assert sorted(file.name for file in (tmp_path / "t").glob("*-*") if file.is_dir()) == [
        "2-Linear"
    ]
