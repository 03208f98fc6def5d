"""Module calls as the hooks report them: callers, arguments, order."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from assay.hooks.module_tracer import (
    ActiveCall,
    ModuleTracer,
    NullHandler,
    _find_graph_test,
    forget_compiled_graphs,
)
from assay.hooks.row_positions import BatchPositions
from assay.sites import CallSite, RowMap


class Log(NullHandler):
    def __init__(self) -> None:
        self.events: list[str] = []
        self.entries: list[ActiveCall] = []

    def enter(self, active: ActiveCall) -> None:
        self.entries.append(active)
        self.events.append(f"> {active.call.site.module or '(model)'}")

    def leave(self, active: ActiveCall, output: Any) -> Any:
        self.events.append(f"< {active.call.site.module or '(model)'}")
        return output

    def finish_root(self, active: ActiveCall) -> None:
        del active
        self.events.append("end")


class Child(nn.Module):
    def forward(self, x: Tensor, *, scale: float = 2.0) -> Any:
        return scale * x


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Child()
        self.second = Child()

    def forward(self, input_ids: Tensor, bias: Tensor | None = None) -> Any:
        x = self.second(self.first(input_ids.float()), scale=3.0)
        x = self.first(x)
        return x if bias is None else x + bias


IDS = torch.tensor([[1, 2]])


@pytest.fixture
def log() -> Log:
    return Log()


def test_calls_are_handled_in_order_with_their_caller(log: Log) -> None:
    model = Parent()
    with ModuleTracer(log).attached(model):
        result = model(IDS)

    assert result.tolist() == [[12.0, 24.0]]
    assert log.events == [
        "> (model)", "> first", "< first", "> second", "< second", "> first", "< first",
        "< (model)", "end",
    ]  # fmt: skip
    calls = [active.call for active in log.entries]
    assert [call.order for call in calls] == [0, 1, 2, 3]
    assert [call.caller for call in calls] == [None, "", "", ""]
    assert [call.site.call for call in calls] == [0, 0, 0, 1]
    assert [call.class_name for call in calls] == ["Parent", "Child", "Child", "Child"]


def test_positional_and_keyword_arguments_have_the_names_of_the_signature(log: Log) -> None:
    model = Parent()
    with ModuleTracer(log).attached(model):
        model(IDS, bias=torch.ones(1))
        model(input_ids=IDS)

    root, first, second = log.entries[:3]
    assert list(root.arguments) == ["input_ids", "bias"]
    assert list(first.arguments) == ["x"]
    assert list(second.arguments) == ["x", "scale"]
    assert list(log.entries[4].arguments) == ["input_ids"]


def test_steps_count_root_calls_and_start_again_with_a_batch(log: Log) -> None:
    model = Parent()
    tracer = ModuleTracer(log)
    with tracer.attached(model):
        model(IDS)
        model(IDS)
        tracer.begin_batch(5, None)
        model(IDS)

    sites = [active.call.site for active in log.entries if not active.call.site.module]
    assert [(site.step, site.micro_batch) for site in sites] == [(0, 0), (1, 0), (0, 5)]


def test_rows_of_a_call_come_from_the_positions_of_its_batch(log: Log) -> None:
    model = Parent()
    tracer = ModuleTracer(log)
    tracer.begin_batch(0, BatchPositions.of_batch((3,), torch.ones(1, 2, dtype=torch.long), 1))
    with tracer.attached(model):
        model(IDS)
        model(IDS[:, :1])

    assert log.entries[0].call.rows == RowMap((3,), ((0, 1),))
    assert log.entries[1].call.rows == RowMap((3,), ((0, 1),))  # children have the root's
    assert log.entries[4].call.rows == RowMap((3,), ((2,),))


def test_an_embedding_before_the_encoder_takes_no_columns(log: Log) -> None:
    # Florence-2 embeds the text, puts images into it, and then calls the encoder.
    class Embedding(nn.Module):
        def forward(self, input_ids: Tensor) -> Tensor:
            return input_ids[..., None].float()

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Child()

        def forward(self, inputs_embeds: Tensor) -> Any:
            return self.layer(inputs_embeds)

    class Model(Parent):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.encoder = Embedding(), Encoder()

    model, tracer = Model(), ModuleTracer(log)
    tracer.begin_batch(0, BatchPositions.of_batch((3,), torch.ones(1, 2, dtype=torch.long), 1))
    with tracer.attached(model):
        model.encoder(inputs_embeds=model.embedding(input_ids=IDS))
        model(IDS[:, :1])

    roots = [active.call for active in log.entries if active.call.caller is None]
    assert [(call.site.module, call.site.step) for call in roots] == [
        ("embedding", 0), ("encoder", 0), ("", 1),
    ]  # fmt: skip
    assert [call.rows for call in roots] == [
        RowMap((3,), ((0, 1),)), RowMap((3,), ((0, 1),)), RowMap((3,), ((2,),)),
    ]  # fmt: skip


def test_calls_without_a_cache_begin_at_the_first_token(log: Log) -> None:
    model = Parent()
    tracer = ModuleTracer(log)
    tracer.begin_batch(0, BatchPositions.of_batch((3,), torch.ones(1, 2, dtype=torch.long), 2))
    with tracer.attached(model):
        for length in (2, 3, 4):
            model(torch.ones(1, length, dtype=torch.long))

    roots = [entry.call.rows for entry in log.entries if entry.call.caller is None]
    assert roots == [RowMap((3,), (tuple(range(length)),)) for length in (2, 3, 4)]


def test_handler_may_replace_arguments_and_results() -> None:
    class Replacing(NullHandler):
        def enter(self, active: ActiveCall) -> None:
            if active.call.site.module == "second":
                active.arguments["x"] = torch.full((1, 2), 10.0)
                active.arguments["scale"] = 5.0

        def leave(self, active: ActiveCall, output: Any) -> Any:
            return output + 1 if not active.call.site.module else output

    model = Parent()
    with ModuleTracer(Replacing()).attached(model):
        assert model(IDS).tolist() == [[101.0, 101.0]]


def test_positional_arguments_beyond_the_names_are_kept(log: Log) -> None:
    class Many(nn.Module):
        def forward(self, first: Tensor, *others: Tensor, last: int = 0, **rest: Any) -> Any:
            return first + sum(others) + last + rest["more"]

    model = Many()
    with ModuleTracer(log).attached(model):
        result = model(torch.ones(1), torch.ones(1), torch.ones(1), last=1, more=10)

    assert float(result) == 14.0
    assert list(log.entries[0].arguments) == ["first", "others", "last", "more"]


def test_arguments_keep_their_names_after_a_setup_replaces_forward(log: Log) -> None:
    model = Parent()
    model.first.forward = lambda *args, **kwargs: 2.0 * (args[0] if args else kwargs["x"])  # type: ignore[method-assign]
    with ModuleTracer(log).attached(model):
        model(IDS)

    assert list(log.entries[1].arguments) == ["x"]


def test_paths_are_those_of_the_unwrapped_model(log: Log) -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self._orig_mod = inner

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self._orig_mod(*args, **kwargs)

    model = Wrapper(Parent())
    with ModuleTracer(log).attached(model):
        model(IDS)

    # The wrapped model is the root: it is told once.
    assert log.events[:2] == ["> (model)", "> first"]
    assert log.events.count("> (model)") == 1


def test_callee_whose_exception_is_caught_does_not_end_the_trace(log: Log) -> None:
    class Raising(nn.Module):
        def forward(self, x: Tensor) -> Any:
            raise ValueError(x)

    class Trying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad = Raising()
            self.good = Child()

        def forward(self, x: Tensor) -> Any:
            try:
                return self.bad(x)
            except ValueError:
                return self.good(x)

    model = Trying()
    with ModuleTracer(log).attached(model):
        model(torch.ones(1))

    assert log.events == ["> (model)", "> bad", "> good", "< good", "< (model)", "end"]


def test_run_that_failed_does_not_confuse_the_next_one(log: Log) -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Any:
            if x.sum() > 1:
                raise ValueError(x)
            return x

    model = Failing()
    tracer = ModuleTracer(log)
    with tracer.attached(model):
        with pytest.raises(ValueError, match="tensor"):
            model(torch.ones(2))
        model(torch.ones(1))

    assert [active.call.caller for active in log.entries] == [None, None]
    assert log.events[-1] == "end"


def test_hooks_are_removed_after_an_exception(log: Log) -> None:
    model = Parent()
    with pytest.raises(ValueError, match="invalid literal"), ModuleTracer(log).attached(model):
        int("x")
    model(IDS)

    assert log.events == []


@pytest.fixture
def compiled_graphs() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("compiled_graphs")
@pytest.mark.parametrize("when", ["before the hooks", "after the hooks"])
def test_compiled_model_reports_every_call(log: Log, when: str) -> None:
    torch.compiler.reset()
    model = Parent()
    expected = model(IDS)
    forward = model.forward
    if when == "before the hooks":
        model.forward = torch.compile(forward, backend="eager")  # type: ignore[method-assign]
        model(IDS)  # a graph without hooks exists
    with ModuleTracer(log).attached(model):
        if when == "after the hooks":
            model.forward = torch.compile(forward, backend="eager")  # type: ignore[method-assign]
        assert torch.equal(model(IDS), expected)

    assert [event for event in log.events if event[0] == ">"] == [
        "> (model)", "> first", "> second", "> first",
    ]  # fmt: skip


@pytest.mark.usefixtures("compiled_graphs")
def test_compiler_is_reset_only_if_it_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    resets: list[None] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(None))
    forget_compiled_graphs()
    assert not resets

    torch.compile(torch.sin, backend="eager")(torch.ones(1))
    forget_compiled_graphs()
    assert len(resets) == 1


@pytest.mark.usefixtures("compiled_graphs")
def test_compiled_wrapper_around_the_model_reports_every_call(log: Log) -> None:
    torch.compiler.reset()
    model = torch.compile(Parent(), backend="eager")
    assert isinstance(model, nn.Module)
    with ModuleTracer(log).attached(model):
        model(IDS)

    assert [event for event in log.events if event[0] == ">"] == [
        "> (model)", "> first", "> second", "> first",
    ]  # fmt: skip


def test_active_is_the_call_whose_code_is_running(log: Log) -> None:
    tracer = ModuleTracer(log)
    seen: list[CallSite] = []

    class Noting(Child):
        def forward(self, x: Tensor, *, scale: float = 2.0) -> Any:
            assert tracer.active is not None
            seen.append(tracer.active.call.site)
            return scale * x

    model = Parent()
    model.first = Noting()
    with tracer.attached(model):
        model(IDS)

    assert seen == [CallSite(0, "first", 0), CallSite(0, "first", 1)]
    assert tracer.active is None


def test_calls_while_the_tracer_is_paused_are_not_handled(log: Log) -> None:
    model, tracer = Parent(), ModuleTracer(log)
    tracer.paused = True
    with tracer.attached(model):
        model(IDS)
        assert log.events == []
        with tracer.unpaused():
            model(IDS)
        heard = list(log.events)
        model(IDS)

    assert heard[0] == "> (model)"
    assert heard[-1] == "end"
    assert log.events == heard


@pytest.mark.usefixtures("compiled_graphs")
def test_compiled_child_counts_as_one_call_with_the_arguments_of_what_it_wraps(
    log: Log,
) -> None:
    torch.compiler.reset()
    model = Parent()
    expected = model(IDS)
    model.first = torch.compile(model.first, backend="eager")  # type: ignore[assignment]
    with ModuleTracer(log).attached(model):
        assert torch.equal(model(IDS), expected)

    assert [event for event in log.events if event[0] == ">"] == [
        "> (model)", "> first", "> second", "> first",
    ]  # fmt: skip
    assert list(log.entries[1].arguments) == ["x"]
    assert log.entries[1].call.class_name == "Child"


def test_module_inside_of_an_activation_checkpoint_counts_and_not_its_wrapper(log: Log) -> None:
    model = Parent()
    model.first = checkpoint_wrapper(model.first)  # type: ignore[assignment]
    with ModuleTracer(log).attached(model):
        model(IDS)

    assert log.entries[1].module is model.first._checkpoint_wrapped_module
    assert log.events.count("> first") == 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        # Recomputation stops after the multiplication, whose factors are the last that backward needs.
        return self.linear(x) * self.linear(x)


class Recomputing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.layer, x, use_reentrant=False)


def test_call_after_a_recomputation_that_stopped_in_another_thread_is_handled(log: Log) -> None:
    model, tracer = Recomputing(), ModuleTracer(log)
    with tracer.attached(model):
        loss = model(torch.ones(1, 2)).sum()
        # Backward of an accelerator has a thread of its own.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(loss.backward).result()
        assert any(active.is_recompute for active in log.entries)
        log.events.clear()

        model(torch.ones(1, 2))

    assert log.events[0] == "> (model)"
    assert log.events[-1] == "end"
    assert tracer.num_left_out == 0


def test_a_cuda_build_without_a_gpu_records_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_current_stream_capturing() -> bool:
        raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version")

    module = SimpleNamespace(is_current_stream_capturing=is_current_stream_capturing)
    monkeypatch.setattr(torch, "get_device_module", lambda: module)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert _find_graph_test()() is False
