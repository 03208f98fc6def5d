"""Recording the module calls of a model, its operations (aten), and the gradients at module boundaries."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from assay.hooks.caches import CacheBefore, CacheTracker
from assay.hooks.expert_choices import count_experts, find_choice_arguments
from assay.hooks.module_tracer import ActiveCall, ModuleTracer
from assay.hooks.suspension import is_suspended, suspended
from assay.hooks.tensors import (
    Boundary,
    InPlaceChanges,
    TensorMap,
    constants,
    replace_tensors,
    write_injected,
)
from assay.sites import Call, CallSite
from assay.trace import TraceWriter

# The sum of a row of attention probabilities in bfloat16 differs from one by at most a unit
# roundoff per rounding. Sums of other rows differ by far more.
PROBABILITY_TOLERANCE = 0.02


T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class CallWriter(Protocol[T_contra]):
    """Stores calls: a `TraceWriter` or a `BackgroundWriter`."""

    def add(self, call: Call, tensors: Mapping[str, T_contra]) -> None:
        """Store a finished call."""

    def flush(self) -> None:
        """Make all added calls survive a kill."""


@dataclass(slots=True)
class UnfinishedCall(Generic[T]):
    """The recorded part of a call that has not ended."""

    tensors: dict[str, T]
    constants: dict[str, object]
    caches: list[CacheBefore]
    changes: InPlaceChanges


@dataclass
class CallRecorder(ABC, Generic[T]):
    """A handler that records every call. T: the copy of a tensor that it keeps."""

    writer: CallWriter[T]
    _known: TensorMap[T] = field(default_factory=TensorMap, init=False)  # injected -> kept
    _caches: CacheTracker = field(default_factory=CacheTracker, init=False)
    _opaque: set[str | None] = field(default_factory=set, init=False)

    @abstractmethod
    def keep(self, value: Tensor) -> tuple[T, Tensor]:
        """Return the copy to keep of a value, and the value for the next module."""

    @property
    def keeps_values(self) -> bool:
        """Return True if a copy stays the same when a call changes the tensor."""
        return True

    def enter(self, active: ActiveCall) -> None:
        """Record the arguments, and replace them by the injected values."""
        if active.call.caller is None:
            self._caches.begin_root()
            self._opaque.clear()
        if active.call.caller in self._opaque or routes_tokens(active):
            self._opaque.add(active.call.site.module)
        if active.call.caller in self._opaque:
            return
        tensors: dict[str, T] = {}
        active.arguments = replace_tensors(
            active.arguments, "input", lambda port, tensor: self._record(tensors, port, tensor)
        )
        active.state = UnfinishedCall(
            tensors,
            constants(active.arguments, "input"),
            self._caches.snapshot(active.arguments),
            InPlaceChanges(active.arguments),
        )

    def leave(self, active: ActiveCall, output: Any) -> Any:  # noqa: ANN401 - see TraceHandler
        """Record the results and the changed arguments, then write the call."""
        unfinished: UnfinishedCall[T] | None = active.state
        if unfinished is None:
            return output
        rows = active.call.rows
        length = rows.length if rows is not None else None

        def pass_result(port: str, tensor: Tensor) -> Tensor:
            if _holds_attention_probabilities(port, tensor, length):
                return tensor
            return self._record(unfinished.tensors, port, tensor)

        for port, tensor in unfinished.changes.changed():
            if not self.keeps_values:
                unfinished.tensors.pop(f"input.{port}", None)
            self._known.forget(tensor)
            self._record_change(unfinished, f"changed.{port}", tensor)
        output = replace_tensors(output, "output", pass_result)
        for addition in self._caches.additions(unfinished.caches):
            self._record_change(unfinished, addition.port, addition.tensor)
        call = replace(active.call, ports=tuple(unfinished.tensors), constants=unfinished.constants)
        self.writer.add(call, unfinished.tensors)
        return output

    def finish_root(self, active: ActiveCall) -> None:
        """Flush the trace."""
        del active
        for cache in self._caches.find_unreadable():
            self.leave_out(f"left out {cache}")
        self._known.clear()
        self.writer.flush()

    def leave_out(self, reason: str) -> None:
        """Note a value that is not recorded. Nothing to do in a golden, whose noise run notes it too."""

    def recognizes(self, value: Tensor) -> bool:
        """Return True if this object was injected."""
        return self._known.get(value) is not None

    def alias(self, new: Tensor, known: Tensor) -> None:
        """Treat `new` as the injected value `known` from now on."""
        stored = self._known.get(known)
        if stored is not None:
            self._known.put(new, stored)

    def in_order(self, active: ActiveCall, made: Tensor) -> Tensor:
        """Return a computed value unchanged: it is recorded in its own order."""
        del active
        return made

    def _record(self, tensors: dict[str, T], port: str, value: Tensor) -> Tensor:
        known = self._known.get(value)
        if known is not None:
            tensors[port] = known
            return value
        tensors[port], injected = self.keep(value)
        self._known.put(injected, tensors[port])
        return injected

    def _record_change(self, unfinished: UnfinishedCall[T], port: str, tensor: Tensor) -> None:
        injected = self._record(unfinished.tensors, port, tensor)
        if injected is not tensor:
            write_injected(tensor, injected)


@dataclass
class Recorder(CallRecorder[Tensor]):
    """Writes every call to `writer`, and gradients at its ports as a call of the phase `backward`.

    `boundary` stores and injects the values.
    """

    writer: TraceWriter
    boundary: Boundary = field(default_factory=Boundary)
    _gradients: dict[CallSite, tuple[Call, dict[str, Tensor]]] = field(default_factory=dict)

    def keep(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stored and the injected value."""
        stored = self.boundary.store(value.detach())
        rounds = value.is_floating_point() or value.is_complex()
        if self.boundary.rounded is None or not rounds:
            return stored, value
        return stored, self.boundary.injected(stored, value.dtype)

    @property
    def keeps_values(self) -> bool:
        """Return True unless the stored value is the tensor itself."""
        return self.boundary.stored is not None

    def expects(self, call: Call, port: str, value: Tensor) -> bool:
        """Return True for every value with a gradient."""
        del call, port
        return value.requires_grad

    def begin_backward(self, gradient: Tensor) -> None:
        """Do nothing: the gradient of the loss is not written."""

    def arrive(self, call: Call, port: str, gradient: Tensor) -> Tensor:
        """Keep a gradient, and return the injected one."""
        stored = self.boundary.store(gradient.detach())
        self._gradients.setdefault(call.site, (call, {}))[1][port] = stored
        return self.boundary.injected(stored, gradient.dtype)

    def finish_backward(self, missing: list[tuple[CallSite, str]]) -> None:
        """Write the gradients, without those that are missing."""
        del missing
        with suspended():
            for call, gradients in self._gradients.values():
                backward = replace(call, site=call.site.backward, ports=tuple(gradients))
                self.writer.add(backward, gradients)
        self._gradients.clear()
        self.writer.flush()


def routes_tokens(active: ActiveCall) -> bool:
    """Return True for the call of a group of experts with the experts of each token, (R, k).

    The calls of its children depend on the data and on the implementation (one call for each
    expert, or one for all). They match no calls elsewhere, and count as the group's own code.
    """
    tensors = [
        one for one in active.arguments.values() if isinstance(one, Tensor) and one.ndim == 2
    ]
    rows = {len(one) for one in tensors if one.is_floating_point()}
    choices = [one for one in tensors if not one.is_floating_point() and len(one) in rows]
    if not choices or active.call.caller is None:
        return False
    num_experts = count_experts(active.module)
    if not num_experts and find_choice_arguments(active.arguments) is not None:
        lists = (nn.ModuleList, nn.ModuleDict)
        children = [one for one in active.module.children() if isinstance(one, lists)]
        num_experts = max(map(len, children), default=0)
    return any(_are_experts(one, num_experts) for one in choices)


def _are_experts(choice_Rk: Tensor, num_experts: int) -> bool:
    """Return True for indices of experts. -1 or `num_experts` stands for an expert of another rank."""
    if not 0 < choice_Rk.shape[1] <= num_experts or not len(choice_Rk):
        return False
    low, high = torch.aminmax(choice_Rk.detach().long())
    return int(low) >= -1 and int(high) <= num_experts


def _holds_attention_probabilities(port: str, tensor: Tensor, length: int | None) -> bool:
    """Return True for attention probabilities that a module returns after its main result.

    Their size is quadratic in the length, no module gets them, and only eager attention returns
    them.
    """
    return (
        port != "output"
        and not port.endswith(".0")
        and tensor.ndim == 4
        and tensor.shape[2] == length
        and tensor.shape[3] >= tensor.shape[2]
        and _holds_probabilities(tensor)
    )


def _holds_probabilities(table_BHTS: Tensor) -> bool:
    """Return True if rows sum to one: rotated queries and keys can have the same shape."""
    if not table_BHTS.is_floating_point() or not table_BHTS.numel():
        return False
    row_S = table_BHTS.detach()[0, 0, -1].double()
    return bool((row_S >= 0).all()) and abs(float(row_S.sum()) - 1) < PROBABILITY_TOLERANCE


# Operations that move or create values without rounding.
MOVING = frozenset(
    # As text: forty names in quotes are hard to read.
    """view _unsafe_view reshape _reshape_alias t transpose permute expand slice select unsqueeze
    squeeze cat stack split split_with_sizes chunk unbind clone _to_copy copy_ copy detach alias
    lift_fresh contiguous index_select index gather embedding arange full zeros ones empty
    full_like zeros_like ones_like empty_like new_full new_zeros new_ones new_empty scalar_tensor
    empty_strided new_empty_strided fill_ fill zero_ narrow unfold repeat as_strided where
    masked_fill masked_fill_
    """.split()  # noqa: SIM905
)

ATTENTION = "scaled_dot_product_attention"

# The common name of aten operations that do one computation.
_CANONICAL = {
    "mm": "linear",
    "addmm": "linear",
    "linear": "linear",
    "mkldnn_linear": "linear",
    "_scaled_dot_product_flash_attention_for_cpu": ATTENTION,
    "_scaled_dot_product_flash_attention": ATTENTION,
    "_scaled_dot_product_efficient_attention": ATTENTION,
    "_scaled_dot_product_cudnn_attention": ATTENTION,
    "_scaled_dot_product_attention_math": ATTENTION,
    "_fused_sdp_choice": ATTENTION,
    "bmm": "matmul",
    "baddbmm": "matmul",
    "_softmax": "softmax",
    "_safe_softmax": "softmax",
    "_grouped_mm": "grouped_mm",
}


# The namespace of collectives, which return before they are done. Reading a result without waiting
# for it ends the process.
COLLECTIVES, WAIT = "_c10d_functional", "wait_tensor"


def operation_name(func: OpOverload) -> str:
    """Return the canonical name of an aten operation: `aten.mm.default` is linear."""
    name: str = func._schema.name.rpartition("::")[2]  # noqa: SLF001 - the public name is the same text
    name = name.rstrip("_") or name
    return _CANONICAL.get(name, name)


def is_pointwise(func: OpOverload) -> bool:
    """Return True if an output element depends on one element of each input, and is rounded once."""
    name = func._schema.name.rpartition("::")[2]  # noqa: SLF001
    return torch.Tag.pointwise in func.tags or name in MOVING or func.is_view


class OperationWatcher(TorchDispatchMode):
    """Shows every operation of a model to `after_operation`."""

    def __init__(self, tracer: ModuleTracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracer = tracer

    def after_operation(self, active: ActiveCall, func: OpOverload, result: object) -> None:
        """Handle an operation of the module of `active`, not of its children."""
        raise NotImplementedError

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        del types
        result: object = func(*args, **(kwargs or {}))
        active = self._tracer.active
        if active is not None and not is_suspended():
            self.after_operation(active, func, result)
        return result


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation that ran: its canonical name, overload, and results.

    A collective has no results; those of `wait_tensor` are its own.
    """

    name: str
    overload: str
    outputs: tuple[Tensor, ...]


class OperationRecorder(OperationWatcher):
    """Keeps the results of the operations of one module in one call.

    wanted: path, step and call of the module.
    separate: paths of the modules inside it whose operations are left out; those of other modules
        count as its own. None: all.
    """

    def __init__(
        self,
        tracer: ModuleTracer,
        wanted: tuple[str, int, int],
        separate: Collection[str] | None = None,
    ) -> None:
        super().__init__(tracer)
        self._wanted = wanted
        self._separate = separate
        self.operations: list[Operation] = []
        self.called: set[str] = set()
        """Paths of the modules that ran operations inside the call."""

    def after_operation(self, active: ActiveCall, func: OpOverload, result: object) -> None:
        """Keep the results of an operation of the wanted call."""
        del active
        sites = [one.call.site for one in self._tracer.running]
        names = [(site.module, site.step, site.call) for site in sites]
        if self._wanted not in names:
            return
        inside = [name for name, _, _ in names[names.index(self._wanted) + 1 :]]
        self.called.update(inside)
        if inside and (self._separate is None or not set(self._separate).isdisjoint(inside)):
            return
        name = operation_name(func)
        if func.namespace.startswith(COLLECTIVES) and name != WAIT:
            self.operations.append(Operation(name, str(func), ()))
            return
        with suspended():
            if results := read_results(func, result):
                tensors = tuple(item.detach().cpu().clone() for item in results)
                self.operations.append(Operation(name, str(func), tensors))


class PointwiseModules(OperationWatcher):
    """Finds the modules whose own operations are all pointwise. Enter it with its tracer."""

    def __init__(self, tracer: ModuleTracer) -> None:
        super().__init__(tracer)
        self._pointwise: dict[str, bool] = {}

    @property
    def paths(self) -> frozenset[str]:
        """Paths of the modules that ran only pointwise operations."""
        return frozenset(name for name, pointwise in self._pointwise.items() if pointwise)

    def after_operation(self, active: ActiveCall, func: OpOverload, result: object) -> None:
        """Exclude a module that runs another operation."""
        del result
        module = active.call.site.module
        self._pointwise[module] = self._pointwise.get(module, True) and is_pointwise(func)


def read_results(func: OpOverload, result: object) -> list[Tensor]:
    """Return the floating-point results of an operation; none of a view."""
    outputs = result if isinstance(result, tuple | list) else (result,)
    return [
        item
        for item in outputs
        if isinstance(item, Tensor) and item.is_floating_point() and not func.is_view
    ]


def align_names(actual: Sequence[str], expected: Sequence[str]) -> dict[int, int]:
    """Map the number of each operation to the number of one with its name, in order."""
    matcher = SequenceMatcher(None, actual, expected, autojunk=False)
    return {
        block.a + offset: block.b + offset
        for block in matcher.get_matching_blocks()
        for offset in range(block.size)
    }
