"""Hooks on every module of a model: which module calls which, with what, and in which order."""

import inspect
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from assay.hooks.suspension import is_suspended, suspended
from assay.hooks.timeline import Timeline
from assay.sites import Call, CallSite, RowMap, unwrapped_path


@dataclass(slots=True)
class ActiveCall:
    """One call that is under way.

    arguments: by their names in the forward signature.
    state: what the handler keeps from `enter` to `leave`; None for a call that it leaves alone.
    is_recompute: whether backward computes anew what the call computed before.
    """

    call: Call
    module: nn.Module
    arguments: dict[str, Any]
    state: Any = None
    is_recompute: bool = False


class TraceHandler(Protocol):
    """What is done at the module boundaries of a run: values there are observed, or replaced."""

    def enter(self, active: ActiveCall) -> None:
        """Called before a module runs; may change `active.arguments` in place."""

    def leave(self, active: ActiveCall, output: Any) -> Any:  # noqa: ANN401 - whatever modules return
        """Called with the module's `output`; returns what its caller gets."""

    def finish_root(self, active: ActiveCall) -> None:
        """Called when the root call has ended."""


class NullHandler:
    """A handler that changes nothing and keeps nothing."""

    def enter(self, active: ActiveCall) -> None:
        """Leave the arguments as they are."""

    def leave(self, active: ActiveCall, output: Any) -> Any:  # noqa: ANN401 - see TraceHandler
        """The output as it is."""
        del active
        return output

    def finish_root(self, active: ActiveCall) -> None:
        """Keep nothing of the root call."""


def _find_graph_test() -> Callable[[], bool]:
    """Return the device's test if it records a graph, which must not copy, and replays no hooks."""
    test: Callable[[], bool] = getattr(
        torch.get_device_module(), "is_current_stream_capturing", lambda: False
    )
    return test


@dataclass
class ModuleTracer:
    """Calls a handler for every module call of a model.

    timeline: rows of the batch that is being run; None if nothing is known of them.
    paused: whether the handler is not called at all.
    rank: of this process.
    num_left_out: calls in other threads while a root call was under way, and calls that a device
        recorded into a graph. They are not handled.
    """

    handler: TraceHandler
    batch: int = 0
    timeline: Timeline | None = None
    step: int = -1
    order: int = 0
    paused: bool = False
    rank: int = 0
    num_left_out: int = 0
    _thread: int | None = None  # of the root call that is under way
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_recording_graph: Callable[[], bool] = field(default_factory=_find_graph_test)
    _column: int = 0
    _stack: list[ActiveCall] = field(default_factory=list)
    _counts: Counter[str] = field(default_factory=Counter)
    _rows: RowMap | None = None
    _made: dict[tuple[str, int], Call] = field(default_factory=dict)
    _num_recomputed: Counter[str] = field(default_factory=Counter)

    def begin_batch(self, number: int, timeline: Timeline | None, first_step: int = 0) -> None:
        """Called before a batch runs: its first root call has the step `first_step`."""
        self.batch, self.timeline = number, timeline
        self.step, self._column = first_step - 1, 0

    @property
    def active(self) -> ActiveCall | None:
        """The innermost call under way; None outside of the model."""
        return self._stack[-1] if self._stack else None

    @property
    def current(self) -> str | None:
        """Path of the module whose code is running; None outside of the model."""
        return self.active.call.site.module if self.active else None

    @property
    def current_call(self) -> tuple[str, int, int] | None:
        """Path, step and call of the module whose code is running."""
        if self.active is None:
            return None
        site = self.active.call.site
        return site.module, site.step, site.call

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Call the handler for every module call of `model` inside this context."""
        handles = []
        for name, (module, innermost) in find_called_modules(model).items():
            pre = self._pre_hook(name, _Signature(innermost), type(innermost).__name__)
            post = self._post_hook()
            # A script may evaluate the model that DistributedDataParallel wraps.
            for one in (module, innermost) if innermost is not module else (module,):
                handles.append(one.register_forward_pre_hook(pre, with_kwargs=True))
                handles.append(one.register_forward_hook(post, with_kwargs=True))
                if not name:
                    handles.append(one.register_forward_hook(self._end_hook(), always_call=True))
        forget_compiled_graphs()
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            forget_compiled_graphs()

    @contextmanager
    def unpaused(self) -> Iterator[None]:
        """Inside, the handler is called."""
        before, self.paused = self.paused, False
        try:
            yield
        finally:
            self.paused = before

    def _pre_hook(self, name: str, signature: "_Signature", class_name: str) -> Callable[..., Any]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
            if self.paused or is_suspended() or not self._claim():
                return None
            if self._is_wrapped_by_current(name, module):
                return None
            with suspended():
                if not name:
                    self._stack.clear()  # of a root call that ended by an exception
                arguments = signature.bind(args, kwargs)
                if is_in_backward():
                    known = self._made.get((name, self._num_recomputed[name]))
                    self._num_recomputed[name] += 1
                    if known is None:
                        self._release()
                        return None
                    active = ActiveCall(known, module, arguments, is_recompute=True)
                else:
                    if not self._stack:
                        self._begin_root(arguments)
                    active = ActiveCall(self._begin_call(name, class_name), module, arguments)
                self._stack.append(active)
                self.handler.enter(active)
                return signature.unbind(active.arguments, len(args))

        hook: Callable[..., Any] = torch.compiler.disable(enter)
        return hook

    def _post_hook(self) -> Callable[..., Any]:
        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:  # noqa: ANN401
            del args, kwargs
            if self.paused or is_suspended() or self._thread != threading.get_ident():
                return None
            if all(active.module is not module for active in self._stack):
                return None  # wrapped by another one, or made again and not before
            with suspended():
                while self._stack[-1].module is not module:
                    self._stack.pop()  # a callee that left by an exception its caller caught
                active = self._stack.pop()
                output = self.handler.leave(active, output)
                if not self._stack and not is_in_backward():
                    self.handler.finish_root(active)
                self._release()
                return output

        hook: Callable[..., Any] = torch.compiler.disable(leave)
        return hook

    def _end_hook(self) -> Callable[..., None]:
        def end(module: nn.Module, args: object, output: object) -> None:
            del args, output
            is_own = self._thread == threading.get_ident() and bool(self._stack)
            if is_own and self._stack[0].module is module:  # it ended by an exception
                self._stack.clear()
                self._release()

        hook: Callable[..., None] = torch.compiler.disable(end)
        return hook

    def _claim(self) -> bool:
        """Return True unless another thread is inside of a root call, or a graph is recorded."""
        with self._lock:
            is_other = self._thread not in (None, threading.get_ident())
            if is_other or self._is_recording_graph():
                self.num_left_out += 1
                return False
            self._thread = threading.get_ident()
            return True

    def _release(self) -> None:
        if not self._stack:
            self._thread = None

    def _is_wrapped_by_current(self, name: str, module: nn.Module) -> bool:
        if not self._stack or self._stack[-1].module is module:
            return False
        return self._stack[-1].call.site.module == name

    def _begin_call(self, name: str, class_name: str) -> Call:
        number = self._counts[name]
        self._counts[name] += 1
        site = CallSite(self.step, name, number, micro_batch=self.batch, rank=self.rank)
        caller = self._stack[-1].call.site.module if self._stack else None
        call = Call(site, class_name, caller, self.order, rows=self._rows)
        self.order += 1
        self._made[name, number] = call
        return call

    def _begin_root(self, arguments: dict[str, Any]) -> None:
        self.step += 1
        self._counts.clear()
        self._made.clear()
        self._num_recomputed.clear()
        ids = _sequence(arguments)
        if ids is None:
            self._rows = None
            return
        timeline, length = self.timeline, ids.shape[1]
        if timeline is None:
            names = "attention_mask", "position_ids", "past_key_values"
            timeline = Timeline.of_call(ids, *map(arguments.get, names))
            self._column = timeline.positions.shape[1] - length
        elif length == self._column + 1:
            self._column = 0  # without a cache, all tokens so far and the new one
        self._rows = timeline.rows(self._column, length)
        self._column += length


def is_in_backward() -> bool:
    """Return True while autograd runs: forward calls are then those of activation checkpointing."""
    return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001 - there is no public name


def find_whole_graphs(model: nn.Module) -> list[str]:
    """Return the paths of modules compiled with fullgraph=True: hooks would end their compilation."""
    return [
        path or "the model"
        for path, module in model.named_modules()
        for function in (vars(module).get("forward"), module._compiled_call_impl)  # noqa: SLF001
        if hasattr(function, "_torchdynamo_orig_callable")
        and getattr(inspect.getclosurevars(function).nonlocals.get("self"), "fullgraph", False)
    ]


def find_called_modules(model: nn.Module) -> dict[str, tuple[nn.Module, nn.Module]]:
    """By path in the unwrapped model the module whose calls count, and the innermost one there.

    A wrapper has the path of what it wraps, and a call of the two is one: that of the wrapper, as
    `torch.compile(module)` returns one, since its result is what the caller gets. Backward calls
    what an activation checkpoint wraps, and not the wrapper again: there it is the wrapped one.
    """
    found: dict[str, tuple[nn.Module, nn.Module]] = {}
    for path, module in model.named_modules():
        name = unwrapped_path(path)
        if hasattr(module, "_checkpoint_wrapped_module"):
            continue
        outermost = found[name][0] if name in found else module
        found[name] = outermost, module
    return found


def _sequence(arguments: dict[str, Any]) -> torch.Tensor | None:
    """The argument that has the tokens of the call, (B, T) or (B, T, C)."""
    for name in ("input_ids", "inputs_embeds", "decoder_input_ids"):
        tensor = arguments.get(name)
        if isinstance(tensor, torch.Tensor) and tensor.ndim >= 2:
            return tensor
    return None


def forget_compiled_graphs() -> None:
    """Make torch.compile trace again: graphs made without hooks do not call them."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


class _Signature:
    """Arguments of a forward method by name, and back to how it was called.

    What came by position goes back by position: wrappers of Hugging Face look into keywords only.
    """

    def __init__(self, module: nn.Module) -> None:
        self._names = []
        self._rest = "args"
        # Of the class: a setup function may have put another callable on the instance.
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
        for parameter in parameters:
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                self._names.append(parameter.name)
            elif parameter.kind is parameter.VAR_POSITIONAL:
                self._rest = parameter.name

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments by name; positional ones beyond the names as one tuple."""
        arguments: dict[str, Any] = dict(zip(self._names, args, strict=False))
        if len(args) > len(self._names):
            arguments[self._rest] = args[len(self._names) :]
        return arguments | kwargs

    def unbind(
        self, arguments: dict[str, Any], num_positional: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`arguments` in the form of a call that had `num_positional` positional ones."""
        names = self._names[:num_positional]
        args = tuple(arguments[name] for name in names)
        if num_positional > len(self._names):
            args += tuple(arguments[self._rest])
            names = [*names, self._rest]
        return args, {name: value for name, value in arguments.items() if name not in names}
