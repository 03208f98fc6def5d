"""Hooks on every module of a model: callers, arguments and order of all calls.

In a model that torch.compile compiled, the hooks run between two graphs.
"""

import inspect
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from assay.hooks.row_positions import BatchPositions, find_tokens, holds_rows
from assay.hooks.suspension import is_suspended, suspended
from assay.hooks.tensors import iterate_tensors
from assay.sites import Call, CallSite, RowMap, unwrapped_path


def find_called_modules(model: nn.Module) -> dict[str, tuple[nn.Module, nn.Module]]:
    """Return the module whose calls count, and the innermost wrapped one, by unwrapped path.

    A wrapper such as that of `torch.compile` and its module share a path, and their calls count as
    one call of the wrapper, whose result the caller gets. A checkpoint wrapper does not count:
    backward calls only the module inside.
    """
    found: dict[str, tuple[nn.Module, nn.Module]] = {}
    for path, module in model.named_modules():
        name = unwrapped_path(path)
        if hasattr(module, "_checkpoint_wrapped_module"):
            continue
        outermost = found[name][0] if name in found else module
        found[name] = outermost, module
    return found


class Signature:
    """Converts the arguments of a forward method to names, and back to the form of the call.

    Positional arguments stay positional: wrappers of Hugging Face read only keywords.
    """

    def __init__(self, module: nn.Module) -> None:
        self._names = []
        self._rest = "args"
        # Of the class: a setup function may have replaced `forward` of the instance.
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
        for parameter in parameters:
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                self._names.append(parameter.name)
            elif parameter.kind is parameter.VAR_POSITIONAL:
                self._rest = parameter.name

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return all arguments by name, those of `*args` as one tuple."""
        arguments: dict[str, Any] = dict(zip(self._names, args, strict=False))
        if len(args) > len(self._names):
            arguments[self._rest] = args[len(self._names) :]
        return arguments | kwargs

    def unbind(
        self, arguments: dict[str, Any], num_positional: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with `num_positional` positional ones."""
        kwargs = dict(arguments)
        args = tuple([kwargs.pop(name) for name in self._names[:num_positional]])
        if num_positional > len(self._names):
            args += tuple(kwargs.pop(self._rest))
        return args, kwargs


# Limits of torch.compile on the graphs of one function.
_LIMITS = "recompile_limit", "accumulated_recompile_limit"


def outside_of_graphs(
    hook: Callable[..., Any], when_left_out: Callable[[], None]
) -> Callable[..., Any]:
    """Return a hook that torch.compile calls between two graphs, and leaves out of a whole graph.

    when_left_out: called when torch.compile leaves the hook out, since fullgraph=True forbids a break.
    """
    from torch._C._dynamo.eval_frame import get_eval_frame_callback
    from torch._dynamo.eval_frame import skip_code
    from torch._dynamo.symbolic_convert import InstructionTranslator

    uncompiled: Callable[..., Any] = torch.compiler.disable(hook)

    # torch.compile calls this function while it traces the hook. `torch._dynamo.error_on_graph_break`
    # sets the second attribute, which torch has from 2.9 on.
    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator] # torch gives it no types
    def is_left_out() -> bool:
        tracing: Any = InstructionTranslator.current_tx()
        is_whole = tracing.one_graph or getattr(tracing, "error_on_graph_break", False)
        if is_whole:
            when_left_out()
        return bool(is_whole)

    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the hook
        if torch.compiler.is_dynamo_compiling():
            return None if is_left_out() else uncompiled(*args, **kwargs)
        # Outside of compiled code no frame is compiled, and `uncompiled` would take longer than the hook.
        return (hook if get_eval_frame_callback() is None else uncompiled)(*args, **kwargs)

    # Otherwise torch.compile compiles this frame, too.
    skip_code(call.__code__)
    return call


@contextmanager
def graphs_for_each(num_modules: int) -> Iterator[None]:
    """Let torch.compile compile a function once for each module inside this context."""
    from torch._dynamo import config

    before = {name: getattr(config, name) for name in _LIMITS}
    # Not by `config.patch`, which has to end in the thread where it began.
    for name, limit in before.items():
        setattr(config, name, max(limit, num_modules))
    try:
        yield
    finally:
        for name, limit in before.items():
            setattr(config, name, limit)


def forget_compiled_graphs() -> None:
    """Make torch.compile trace again: graphs of a model without hooks do not call them."""
    dynamo = sys.modules.get("torch._dynamo")
    # On a GPU, a reset imports inductor, which takes seconds.
    if dynamo is not None and dynamo.convert_frame.input_codes.seen:
        torch.compiler.reset()


def find_compiled_modules(model: nn.Module) -> list[str]:
    """Return the paths of compiled modules, whose operations do not run one by one."""
    return [
        path or "the model"
        for path, module in model.named_modules()
        if module._compiled_call_impl is not None  # noqa: SLF001 - no public name
        or isinstance(module, torch._dynamo.OptimizedModule)  # noqa: SLF001
    ]


# A root call that begins no call for so long waits for another thread. One module takes less.
PATIENCE_SECONDS = 10.0


@dataclass(slots=True)
class ActiveCall:
    """A call that has not ended."""

    call: Call
    module: nn.Module
    arguments: dict[str, Any]
    """By their names in the forward signature."""
    state: Any = None
    """The handler's, from `enter` to `leave`; None for a call that it skips."""
    is_recompute: bool = False
    """True if backward repeats an earlier call (activation checkpointing)."""


class TraceHandler(Protocol):
    """Observes or replaces the values at the module boundaries of a run."""

    def enter(self, active: ActiveCall) -> None:
        """Handle a call before the module runs; may change `active.arguments`."""

    def leave(self, active: ActiveCall, output: Any) -> Any:  # noqa: ANN401 - whatever modules return
        """Return the result that the module's caller gets."""

    def finish_root(self, active: ActiveCall) -> None:
        """Handle the end of the root call."""


class NullHandler:
    """A handler that changes nothing and keeps nothing."""

    def enter(self, active: ActiveCall) -> None:
        """Do nothing."""

    def leave(self, active: ActiveCall, output: Any) -> Any:  # noqa: ANN401 - see TraceHandler
        """Return the output unchanged."""
        del active
        return output

    def finish_root(self, active: ActiveCall) -> None:
        """Do nothing."""


class _LeftOutCall(threading.local):
    """The outermost running call of a thread that is left out, with the calls that it makes."""

    module: nn.Module | None = None
    path: str = ""
    is_dry_run: bool = False

    def end(self, module: nn.Module) -> bool:
        """Return True at the end of this call."""
        has_ended = self.module is module
        if has_ended:
            self.module = None
        return has_ended


def _find_graph_test() -> Callable[[], bool]:
    """Return the device's test for recording a graph, which must not copy, and replays no hooks.

    torch 2.14.1+cu130 names the CUDA module on a machine without a GPU, where that test raises.
    """
    if not torch.accelerator.is_available():
        return lambda: False
    test: Callable[[], bool] = getattr(
        torch.get_device_module(), "is_current_stream_capturing", lambda: False
    )
    return test


def _move_captures_to_end(module: nn.Module) -> None:
    """Let transformers capture hidden states behind our hooks, as when its hooks come at the first call."""
    hooks = module._forward_hooks  # noqa: SLF001 - no public name
    for key, hook in [*hooks.items()]:
        if getattr(hook, "__name__", "") == "output_capturing_hook":
            hooks[key] = hooks.pop(key)


@dataclass
class ModuleTracer:
    """Calls a handler around every module call of a model, and gives each call its address.

    Everything that assay records, measures or replaces passes through a handler of this class. One tracer
    serves one model for a whole run: `attached` installs the hooks, `begin_batch` states which prompts come
    next, and each *root call*, a call of the model itself, is one step. A generation loop that first calls a
    tower of images does so in the step of the model's next call. Inside a root call the handler
    gets `enter` before each module and `leave` after it, nested as the modules call each other. What
    `enter` leaves in `ActiveCall.arguments` is what the module receives; what `leave` returns is what its
    caller receives.

    Invariants:
        - An address depends on the model and its inputs, not on how the model is wrapped. A module and its
          wrappers share a path, and one call of them counts once.
        - Handlers are suspended while they run: modules and operations that a handler calls are not traced.
        - `leave` or an exception ends each call. No hook runs for a call that ends by an exception, so the next
          outer `leave` or root call drops what remains above it on the stack.
        - One thread owns the stack. A root call of a second thread waits for it, and is left out, and
          counted, if the first one waits for the second.

    Traps:
        - While autograd runs, a forward call is a recomputation of activation checkpointing. Its handler
          gets the `Call` of the first time with `is_recompute`. Recomputation may stop inside a module, so
          `leave` may be missing.
        - torch.compile inlines hooks into its graphs, so `outside_of_graphs` makes each hook a graph break.
          Under fullgraph=True it leaves the hooks out. `in_whole_graphs` names the modules of these calls.
        - A device that records a graph runs the hooks once, and replays the graph without them.
        - Without a cache, a generation loop passes all tokens again. Rows are found by the number of
          columns, not by the number of the step.
    """

    handler: TraceHandler
    batch: int = 0
    positions: BatchPositions | None = None
    """Those of the current batch; None if unknown."""
    step: int = -1
    order: int = 0
    paused: bool = False
    """True while the handler is not called."""
    rank: int = 0
    num_left_out: int = 0
    """Calls that a device recorded into a graph, and those of other threads that a root call made."""
    in_whole_graphs: dict[str, None] = field(default_factory=dict)
    """Paths of modules whose calls are left out, as fullgraph=True forbids a break between graphs."""
    num_dry_runs: int = 0
    """Root calls without results, see `is_dry_run`."""
    _left_out: _LeftOutCall = field(default_factory=_LeftOutCall)
    _thread: int | None = None  # of the current root call
    _freed: threading.Condition = field(default_factory=threading.Condition)
    _waits: bool = True  # until a root call waited for one of another thread
    _is_recording_graph: Callable[[], bool] = field(default_factory=_find_graph_test)
    _column: int = 0
    _stack: list[ActiveCall] = field(default_factory=list)
    _counts: Counter[str] = field(default_factory=Counter)
    _rows: RowMap | None = None
    _step_has_begun: bool = False
    """True between the call of a tower outside of the model and the model's own call."""
    _has_own_rows: bool = True
    """False if the rows of a pass are given, and hold for all of its calls."""
    _calls: dict[tuple[str, int], Call] = field(default_factory=dict)
    _num_recomputed: Counter[str] = field(default_factory=Counter)

    def begin_batch(
        self, number: int, positions: BatchPositions | None, first_step: int = 0
    ) -> None:
        """Begin a batch, whose first root call has the step `first_step`."""
        self.batch, self.positions = number, positions
        self.step, self._column, self._step_has_begun = first_step - 1, 0, False

    @property
    def active(self) -> ActiveCall | None:
        """The innermost running call; None outside of the model."""
        return self._stack[-1] if self._stack else None

    @property
    def running(self) -> Sequence[ActiveCall]:
        """The calls that have not ended, outermost first."""
        return self._stack

    @contextmanager
    def attached(self, model: nn.Module, modules: Collection[str] | None = None) -> Iterator[None]:
        """Call the handler for the module calls of `model` inside this context.

        modules: paths of the modules to trace; None for all. "" is the model itself.
        """
        handles = []
        end = self._outside_of_graphs(self._end_root, "")
        called = find_called_modules(model)
        for name, (module, innermost) in called.items():
            if modules is not None and name not in modules:
                continue
            pre = self._pre_hook(name, Signature(innermost), type(innermost).__name__)
            post = self._outside_of_graphs(self._leave, name)
            # A script may evaluate the model that DistributedDataParallel wraps.
            for one in (module, innermost) if innermost is not module else (module,):
                handles.append(one.register_forward_pre_hook(pre, with_kwargs=True))
                handles.append(one.register_forward_hook(post, with_kwargs=True))
                if not name:
                    handles.append(one.register_forward_hook(end, always_call=True))
                _move_captures_to_end(one)
        forget_compiled_graphs()
        try:
            with graphs_for_each(len(called)):
                yield
        finally:
            for handle in handles:
                handle.remove()
            forget_compiled_graphs()

    @contextmanager
    def unpaused(self) -> Iterator[None]:
        """Call the handler inside this context."""
        before, self.paused = self.paused, False
        try:
            yield
        finally:
            self.paused = before

    def _pre_hook(self, name: str, signature: Signature, class_name: str) -> Callable[..., Any]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
            if self.paused or is_suspended() or not self._claim(name, module, (args, kwargs)):
                return None
            if self._is_wrapped_by_current(name, module):
                return None
            with suspended():
                if not name:
                    self._stack.clear()  # of a root call that ended by an exception
                arguments = signature.bind(args, kwargs)
                if is_in_backward():
                    known = self._calls.get((name, self._num_recomputed[name]))
                    self._num_recomputed[name] += 1
                    if known is None:
                        self._release()
                        return None
                    active = ActiveCall(known, module, arguments, is_recompute=True)
                else:
                    if not self._stack:
                        self._begin_root(name, module, arguments)
                    call = self._begin_call(name, class_name, arguments)
                    active = ActiveCall(call, module, arguments)
                self._stack.append(active)
                self.handler.enter(active)
                return signature.unbind(active.arguments, len(args))

        return self._outside_of_graphs(enter, name)

    def _outside_of_graphs(self, hook: Callable[..., Any], path: str) -> Callable[..., Any]:
        return outside_of_graphs(hook, lambda: self.in_whole_graphs.update({path: None}))

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:  # noqa: ANN401
        del args, kwargs
        if self._left_out.end(module):
            return None
        if self.paused or is_suspended() or self._thread != threading.get_ident():
            return None
        stack = self._stack
        depth = len(stack) - 1  # calls inside it remain if it caught their exceptions
        while depth >= 0 and stack[depth].module is not module:
            depth -= 1
        if depth < 0:
            return None  # its wrapper has the call, or only backward calls it
        active = stack[depth]
        del stack[depth:]
        with suspended():
            output = self.handler.leave(active, output)
            if not stack and not is_in_backward():
                self.handler.finish_root(active)
            self._release()
            return output

    def _end_root(self, module: nn.Module, args: object, output: object) -> None:
        del args, output
        self._left_out.end(module)
        is_own = self._thread == threading.get_ident() and bool(self._stack)
        if is_own and self._stack[0].module is module:  # it ended by an exception
            self._stack.clear()
            self._release()

    def is_dry_run(self, arguments: object) -> bool:
        """Return True for a root call without results, such as one that only learns shapes."""
        del arguments
        return False

    def _claim(self, path: str, module: nn.Module, arguments: object) -> bool:
        """Return True unless the call is left out.

        Calls are left out during a root call of another thread, while a device records a graph, in a
        dry run, and inside of calls that are left out.
        """
        left_out = self._left_out
        if left_out.path and not path:
            left_out.module = None  # a part of the model that ended by an exception
        if left_out.module is None:
            is_claimed = self._take_thread()
            left_out.is_dry_run = is_claimed and not self._stack and self.is_dry_run(arguments)
            if is_claimed and not left_out.is_dry_run:
                return True
            left_out.module, left_out.path = module, path
            if left_out.is_dry_run:
                self._release()
                self.num_dry_runs += 1
        if not left_out.is_dry_run:
            with self._freed:
                self.num_left_out += 1
        return False

    def _take_thread(self) -> bool:
        """Return True unless another thread runs a root call, or a device records a graph.

        A root call waits for that of another thread, but not if that one waits for it.
        """
        if self._thread == threading.get_ident():
            return not self._is_recording_graph()
        with self._freed:
            if self._is_taken() and self._stack and self._stack[0].is_recompute:
                # Recomputation stops within a call, and on an accelerator backward has its own thread.
                self._stack.clear()
                self._thread = None
            while self._is_taken() and self._waits:
                num_begun = self.order
                has_ended = self._freed.wait_for(lambda: not self._is_taken(), PATIENCE_SECONDS)
                self._waits = has_ended or self.order > num_begun
            if self._is_taken() or self._is_recording_graph():
                return False
            self._thread = threading.get_ident()
            return True

    def _is_taken(self) -> bool:
        return self._thread not in (None, threading.get_ident())

    def _release(self) -> None:
        if not self._stack:
            with self._freed:
                self._thread = None
                self._freed.notify()

    def _is_wrapped_by_current(self, name: str, module: nn.Module) -> bool:
        current = self.active
        return (
            current is not None
            and current.module is not module
            and current.call.site.module == name
        )

    def _begin_call(
        self, name: str, class_name: str, arguments: dict[str, Any] | None = None
    ) -> Call:
        number = self._counts[name]
        self._counts[name] += 1
        site = CallSite(self.step, name, number, micro_batch=self.batch, rank=self.rank)
        caller = self._stack[-1].call.site.module if self._stack else None
        call = Call(site, class_name, caller, self.order, rows=self._find_rows(arguments))
        self.order += 1
        self._calls[name, number] = call
        return call

    def _begin_root(self, path: str, module: nn.Module, arguments: dict[str, Any]) -> None:
        if not self._step_has_begun:
            self.step += 1
            self._counts.clear()
            self._calls.clear()
            self._num_recomputed.clear()
        found = find_tokens(arguments)
        self._has_own_rows = self.positions is None
        # A model may embed the tokens of an encoder before it calls it.
        is_embedding = bool(path) and not any(module.children())
        is_part = found is None or is_embedding
        self._step_has_begun = bool(path) and is_part and not self._has_own_rows
        if found is None:
            # A model without tokens has one row for each image or sound.
            has_rows = not path and self.positions is not None and self.positions.positions.numel()
            self._rows = self.positions.rows(0, 1) if self.positions and has_rows else None
            return
        positions, length = self.positions, found.values.shape[1]
        if positions is None:
            self._rows = found.derive_rows()
            return
        is_whole = isinstance(found.mask, torch.Tensor) and found.mask.shape[1:] == (length,)
        if (is_whole and not found.prefix) or length == self._column + 1:
            self._column = 0  # another text before this one, or without a cache all tokens so far
        self._rows = positions.rows(self._column, length)
        self._column += 0 if is_embedding else length

    def _find_rows(self, arguments: dict[str, Any] | None) -> RowMap | None:
        """Return the rows of a call: those of its caller, or of other tokens that it gets.

        An encoder and its decoder have their own tokens. A tower of images gets none.
        """
        if arguments is None or not self._stack or not self._has_own_rows:
            return self._rows
        own = find_tokens(arguments)
        if own is not None:
            for outer in reversed(self._stack):
                known = find_tokens(outer.arguments)
                if known is not None and own.are_of(known, outer.call.rows):
                    return outer.call.rows
            return own.derive_rows()
        rows = self._stack[-1].call.rows
        tensors = iterate_tensors(arguments, "")
        return rows if any(holds_rows(tensor.shape, rows) for _, tensor in tensors) else None


def is_in_backward() -> bool:
    """Return True while autograd runs: forward calls are then those of activation checkpointing."""
    return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001 - no public name
