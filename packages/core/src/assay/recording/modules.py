"""Recording the calls of a model into a trace."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from torch import Tensor

from assay.hooks.caches import CacheTracker
from assay.hooks.in_place_changes import InPlaceChanges, write_injected
from assay.hooks.module_tracer import ActiveCall
from assay.hooks.values.boundary import Boundary
from assay.hooks.values.nested import constants, map_tensors
from assay.hooks.values.tensor_map import TensorMap
from assay.sites import Call
from assay.trace import TraceWriter

# How far a row of attention probabilities in bfloat16 is from one: at most a unit roundoff for
# each of its roundings, far less than rows of anything else.
PROBABILITY_TOLERANCE = 0.02


T = TypeVar("T")


@dataclass(slots=True)
class Pending(Generic[T]):
    """What is recorded of a call that has not ended.

    caches, changes: the state of its arguments when it began.
    """

    tensors: dict[str, T]
    constants: dict[str, object]
    caches: dict[Any, Any]
    changes: InPlaceChanges


@dataclass
class CallRecorder(ABC, Generic[T]):
    """A handler that records every call. T: what is kept of a tensor."""

    _known: TensorMap[T] = field(default_factory=TensorMap, init=False)  # injected -> kept
    _caches: CacheTracker = field(default_factory=CacheTracker, init=False)
    _opaque: set[str | None] = field(default_factory=set, init=False)

    @abstractmethod
    def keep(self, value: Tensor) -> tuple[T, Tensor]:
        """Return what is kept of a value, and what the next module gets instead."""

    @abstractmethod
    def write(self, call: Call, tensors: dict[str, T]) -> None:
        """Write a finished call."""

    @abstractmethod
    def flush(self) -> None:
        """Make what was written survive a kill."""

    @property
    def keeps_values(self) -> bool:
        """Return True if what is kept of a tensor stays when a call changes the tensor."""
        return True

    def enter(self, active: ActiveCall) -> None:
        """Record the arguments, and replace them by what `keep` returns."""
        if active.call.caller is None:
            self._caches.begin_root()
            self._opaque.clear()
        if active.call.caller in self._opaque or routes_rows(active.arguments):
            self._opaque.add(active.call.site.module)
        if active.call.caller in self._opaque:
            return
        tensors: dict[str, T] = {}
        for name, value in active.arguments.items():
            active.arguments[name] = map_tensors(
                value, f"input.{name}", lambda port, tensor: self._record(tensors, port, tensor)
            )
        active.state = Pending(
            tensors,
            constants(active.arguments, "input"),
            self._caches.snapshot(active.arguments),
            InPlaceChanges(active.arguments),
        )

    def leave(self, active: ActiveCall, output: Any) -> Any:  # noqa: ANN401 - see TraceHandler
        """Record the results and what the call changed, then write the call."""
        pending: Pending[T] | None = active.state
        if pending is None:
            return output
        rows = active.call.rows
        length = rows.length if rows is not None else None

        def pass_result(port: str, tensor: Tensor) -> Tensor:
            if _holds_attention_probabilities(port, tensor, length):
                return tensor
            return self._record(pending.tensors, port, tensor)

        for port, tensor in pending.changes.changed():
            if not self.keeps_values:
                pending.tensors.pop(f"input.{port}", None)
            self._known.forget(tensor)
            injected = self._record(pending.tensors, f"changed.{port}", tensor)
            if injected is not tensor:
                write_injected(tensor, injected)
        output = map_tensors(output, "output", pass_result)
        for addition in self._caches.additions(active.arguments, pending.caches, length):
            injected = self._record(pending.tensors, addition.port, addition.tensor)
            if injected is not addition.tensor:
                write_injected(addition.tensor, injected)
        call = replace(active.call, ports=tuple(pending.tensors), constants=pending.constants)
        self.write(call, pending.tensors)
        return output

    def finish_root(self, active: ActiveCall) -> None:
        """Write what was recorded: what the index names survives a kill."""
        del active
        self._known.clear()
        self.flush()

    def recognises(self, value: Tensor) -> bool:
        """Whether this very object was injected."""
        return self._known.get(value) is not None

    def alias(self, new: Tensor, known: Tensor) -> None:
        """From now on treat `new` as the injected value `known`."""
        stored = self._known.get(known)
        if stored is not None:
            self._known.put(new, stored)

    def in_order(self, active: ActiveCall, made: Tensor) -> Tensor:
        """What a call made, as it is: it is recorded in its own order."""
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


@dataclass
class Recorder(CallRecorder[Tensor]):
    """Writes every call to `writer`; values are stored and injected by `boundary`."""

    writer: TraceWriter
    boundary: Boundary = field(default_factory=Boundary)

    def keep(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stored and the injected value."""
        stored = self.boundary.store(value.detach())
        rounds = value.is_floating_point() or value.is_complex()
        if self.boundary.rounded is None or not rounds:
            return stored, value
        return stored, self.boundary.injected(stored, value.dtype)

    def write(self, call: Call, tensors: dict[str, Tensor]) -> None:
        """Add a call to the trace."""
        self.writer.add(call, tensors)

    def flush(self) -> None:
        """Flush the trace."""
        self.writer.flush()

    @property
    def keeps_values(self) -> bool:
        """Return True unless what is kept is the tensor itself."""
        return self.boundary.stored is not None


def routes_rows(arguments: dict[str, Any]) -> bool:
    """Whether arguments hold indices of which rows go where, as those of a group of experts do.

    How its children are called then depends on the data and on how it is implemented (one call for
    each expert, one for all): they have no partners elsewhere, and are part of its own code.
    """
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    rows = {t.shape[0] for t in tensors if t.ndim == 2 and t.is_floating_point()}
    return any(t.ndim == 2 and not t.is_floating_point() and t.shape[0] in rows for t in tensors)


def _holds_attention_probabilities(port: str, tensor: Tensor, length: int | None) -> bool:
    """Whether `tensor` holds attention probabilities, returned after the main result.

    They are quadratic in the length, no module's input, and only eager attention returns them.
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
    """Whether rows sum to one: rotated queries and keys have the same shape where S is small."""
    if not table_BHTS.is_floating_point() or not table_BHTS.numel():
        return False
    row_S = table_BHTS.detach()[0, 0, -1].double()
    return bool((row_S >= 0).all()) and abs(float(row_S.sum()) - 1) < PROBABILITY_TOLERANCE
