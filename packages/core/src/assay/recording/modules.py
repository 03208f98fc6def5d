"""Recording the module calls of a model, and the gradients at their boundaries, into a trace."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from assay.hooks.expert_choices import count_experts, find_choice_arguments
from assay.hooks.in_place_changes import CacheBefore, CacheTracker, InPlaceChanges, write_injected
from assay.hooks.module_tracer import ActiveCall
from assay.hooks.suspension import suspended
from assay.hooks.values.boundary import Boundary
from assay.hooks.values.nested import constants, map_tensors
from assay.hooks.values.tensor_map import TensorMap
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
        active.arguments = map_tensors(
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
        output = map_tensors(output, "output", pass_result)
        for addition in self._caches.additions(unfinished.caches, length):
            self._record_change(unfinished, addition.port, addition.tensor)
        call = replace(active.call, ports=tuple(unfinished.tensors), constants=unfinished.constants)
        self.writer.add(call, unfinished.tensors)
        return output

    def finish_root(self, active: ActiveCall) -> None:
        """Flush the trace."""
        del active
        self._known.clear()
        self.writer.flush()

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
    """Writes every call to `writer`; `boundary` stores and injects the values."""

    writer: TraceWriter
    boundary: Boundary = field(default_factory=Boundary)

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


@dataclass
class GradientRecorder:
    """Writes the gradients at all boundaries, as calls of the phase `backward`."""

    writer: TraceWriter
    boundary: Boundary
    _arrived: dict[CallSite, tuple[Call, dict[str, Tensor]]] = field(default_factory=dict)

    def expects(self, call: Call, port: str, value: Tensor) -> bool:
        """Return True for every value with a gradient."""
        del call, port
        return value.requires_grad

    def announce(self, call: Call, port: str) -> None:
        """Do nothing: a gradient that never arrives is not written."""

    def begin_backward(self, gradient: Tensor) -> None:
        """Do nothing: the gradient of the loss is not written."""

    def arrive(self, call: Call, port: str, gradient: Tensor) -> Tensor:
        """Keep a gradient, and return the injected one."""
        stored = self.boundary.store(gradient.detach())
        self._arrived.setdefault(call.site, (call, {}))[1][port] = stored
        return self.boundary.injected(stored, gradient.dtype)

    def finish_backward(self) -> None:
        """Write the gradients."""
        with suspended():
            for call, gradients in self._arrived.values():
                backward = replace(call, site=call.site.backward, ports=tuple(gradients))
                self.writer.add(backward, gradients)
        self._arrived.clear()
        self.writer.flush()
