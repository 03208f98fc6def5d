"""The story that hooks tell: who calls whom, with what, in which order."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from assay.hooks.module_tracer import ActiveCall, ModuleTracer, NullHandler
from assay.hooks.timeline import Timeline
from assay.sites import RowMap


class Diary(NullHandler):
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
def diary() -> Diary:
    return Diary()


def test_calls_are_handled_in_order_with_their_caller(diary: Diary) -> None:
    model = Parent()
    with ModuleTracer(diary).attached(model):
        result = model(IDS)

    assert result.tolist() == [[12.0, 24.0]]
    assert diary.events == [
        "> (model)", "> first", "< first", "> second", "< second", "> first", "< first",
        "< (model)", "end",
    ]  # fmt: skip
    calls = [active.call for active in diary.entries]
    assert [call.order for call in calls] == [0, 1, 2, 3]
    assert [call.caller for call in calls] == [None, "", "", ""]
    assert [call.site.call for call in calls] == [0, 0, 0, 1]
    assert [call.class_name for call in calls] == ["Parent", "Child", "Child", "Child"]


def test_arguments_are_named_by_the_signature_however_they_were_given(diary: Diary) -> None:
    model = Parent()
    with ModuleTracer(diary).attached(model):
        model(IDS, bias=torch.ones(1))
        model(input_ids=IDS)

    root, first, second = diary.entries[:3]
    assert list(root.arguments) == ["input_ids", "bias"]
    assert list(first.arguments) == ["x"]
    assert list(second.arguments) == ["x", "scale"]
    assert list(diary.entries[4].arguments) == ["input_ids"]


def test_steps_count_root_calls_and_start_again_with_a_batch(diary: Diary) -> None:
    model = Parent()
    tracer = ModuleTracer(diary)
    with tracer.attached(model):
        model(IDS)
        model(IDS)
        tracer.begin_batch(5, None)
        model(IDS)

    sites = [active.call.site for active in diary.entries if not active.call.site.module]
    assert [(site.step, site.micro_batch) for site in sites] == [(0, 0), (1, 0), (0, 5)]


def test_rows_of_a_call_come_from_the_timeline(diary: Diary) -> None:
    model = Parent()
    tracer = ModuleTracer(diary)
    tracer.begin_batch(0, Timeline.of_batch((3,), torch.ones(1, 2, dtype=torch.long), 1))
    with tracer.attached(model):
        model(IDS)
        model(IDS[:, :1])

    assert diary.entries[0].call.rows == RowMap((3,), ((0, 1),))
    assert diary.entries[1].call.rows == RowMap((3,), ((0, 1),))  # children have the root's
    assert diary.entries[4].call.rows == RowMap((3,), ((2,),))


def test_calls_without_a_cache_begin_at_the_first_token(diary: Diary) -> None:
    model = Parent()
    tracer = ModuleTracer(diary)
    tracer.begin_batch(0, Timeline.of_batch((3,), torch.ones(1, 2, dtype=torch.long), 2))
    with tracer.attached(model):
        for length in (2, 3, 4):
            model(torch.ones(1, length, dtype=torch.long))

    roots = [entry.call.rows for entry in diary.entries if entry.call.caller is None]
    assert roots == [RowMap((3,), (tuple(range(length)),)) for length in (2, 3, 4)]


def test_rows_without_a_timeline_come_from_the_mask_of_the_call(diary: Diary) -> None:
    class Masked(nn.Module):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
            return input_ids * attention_mask

    model = Masked()
    with ModuleTracer(diary).attached(model):
        model(torch.ones(2, 2), torch.tensor([[0, 1], [1, 1]]))

    assert diary.entries[0].call.rows == RowMap((0, 1), ((-1, 0), (0, 1)))


def test_listener_may_replace_arguments_and_results() -> None:
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


def test_positional_arguments_beyond_the_names_are_kept(diary: Diary) -> None:
    class Many(nn.Module):
        def forward(self, first: Tensor, *others: Tensor, last: int = 0, **rest: Any) -> Any:
            return first + sum(others) + last + rest["more"]

    model = Many()
    with ModuleTracer(diary).attached(model):
        result = model(torch.ones(1), torch.ones(1), torch.ones(1), last=1, more=10)

    assert float(result) == 14.0
    assert list(diary.entries[0].arguments) == ["first", "others", "last", "more"]


def test_arguments_keep_their_names_where_a_setup_replaced_forward(diary: Diary) -> None:
    model = Parent()
    model.first.forward = lambda *args, **kwargs: 2.0 * (args[0] if args else kwargs["x"])  # type: ignore[method-assign]
    with ModuleTracer(diary).attached(model):
        model(IDS)

    assert list(diary.entries[1].arguments) == ["x"]


def test_paths_are_those_of_the_unwrapped_model(diary: Diary) -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self._orig_mod = inner

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self._orig_mod(*args, **kwargs)

    model = Wrapper(Parent())
    with ModuleTracer(diary).attached(model):
        model(IDS)

    # The wrapped model is the root: it is told once.
    assert diary.events[:2] == ["> (model)", "> first"]
    assert diary.events.count("> (model)") == 1


def test_callee_whose_exception_is_caught_does_not_end_the_story(diary: Diary) -> None:
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
    with ModuleTracer(diary).attached(model):
        model(torch.ones(1))

    assert diary.events == ["> (model)", "> bad", "> good", "< good", "< (model)", "end"]


def test_run_that_failed_does_not_confuse_the_next_one(diary: Diary) -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Any:
            if x.sum() > 1:
                raise ValueError(x)
            return x

    model = Failing()
    tracer = ModuleTracer(diary)
    with tracer.attached(model):
        with pytest.raises(ValueError, match="tensor"):
            model(torch.ones(2))
        model(torch.ones(1))

    assert [active.call.caller for active in diary.entries] == [None, None]
    assert diary.events[-1] == "end"


def test_hooks_are_gone_afterwards_also_after_an_exception(diary: Diary) -> None:
    model = Parent()
    with pytest.raises(ValueError, match="invalid literal"), ModuleTracer(diary).attached(model):
        int("x")
    model(IDS)

    assert diary.events == []


@pytest.fixture
def compiled_graphs() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("compiled_graphs")
@pytest.mark.parametrize("when", ["before the hooks", "after the hooks"])
def test_compiled_model_reports_every_call(diary: Diary, when: str) -> None:
    torch.compiler.reset()
    model = Parent()
    expected = model(IDS)
    forward = model.forward
    if when == "before the hooks":
        model.forward = torch.compile(forward, backend="eager")  # type: ignore[method-assign]
        model(IDS)  # a graph without hooks exists
    with ModuleTracer(diary).attached(model):
        if when == "after the hooks":
            model.forward = torch.compile(forward, backend="eager")  # type: ignore[method-assign]
        assert torch.equal(model(IDS), expected)

    assert [event for event in diary.events if event[0] == ">"] == [
        "> (model)", "> first", "> second", "> first",
    ]  # fmt: skip


@pytest.mark.usefixtures("compiled_graphs")
def test_compiled_wrapper_around_the_model_reports_every_call(diary: Diary) -> None:
    torch.compiler.reset()
    model = torch.compile(Parent(), backend="eager")
    assert isinstance(model, nn.Module)
    with ModuleTracer(diary).attached(model):
        model(IDS)

    assert [event for event in diary.events if event[0] == ">"] == [
        "> (model)", "> first", "> second", "> first",
    ]  # fmt: skip


def test_watch_knows_whose_code_is_running(diary: Diary) -> None:
    tracer = ModuleTracer(diary)
    seen: list[tuple[str, int, int] | None] = []

    class Telling(Child):
        def forward(self, x: Tensor, *, scale: float = 2.0) -> Any:
            seen.append(tracer.current_call)
            return scale * x

    model = Parent()
    model.first = Telling()
    with tracer.attached(model):
        model(IDS)

    assert seen == [("first", 0, 0), ("first", 0, 1)]
    assert (tracer.current, tracer.current_call) == (None, None)


def test_calls_while_the_tracer_is_paused_are_not_handled(diary: Diary) -> None:
    model, tracer = Parent(), ModuleTracer(diary)
    tracer.paused = True
    with tracer.attached(model):
        model(IDS)
        assert diary.events == []
        with tracer.unpaused():
            model(IDS)
        heard = list(diary.events)
        model(IDS)

    assert heard[0] == "> (model)"
    assert heard[-1] == "end"
    assert diary.events == heard


@pytest.mark.usefixtures("compiled_graphs")
def test_compiled_child_counts_as_one_call_with_the_arguments_of_what_it_wraps(
    diary: Diary,
) -> None:
    torch.compiler.reset()
    model = Parent()
    expected = model(IDS)
    model.first = torch.compile(model.first, backend="eager")  # type: ignore[assignment]
    with ModuleTracer(diary).attached(model):
        assert torch.equal(model(IDS), expected)

    assert [event for event in diary.events if event[0] == ">"] == [
        "> (model)", "> first", "> second", "> first",
    ]  # fmt: skip
    assert list(diary.entries[1].arguments) == ["x"]
    assert diary.entries[1].call.class_name == "Child"


def test_module_inside_of_an_activation_checkpoint_is_the_one_that_counts(diary: Diary) -> None:
    model = Parent()
    model.first = checkpoint_wrapper(model.first)  # type: ignore[assignment]
    with ModuleTracer(diary).attached(model):
        model(IDS)

    assert diary.entries[1].module is model.first._checkpoint_wrapped_module
    assert diary.events.count("> first") == 2
