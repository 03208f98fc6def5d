"""Recording the calls of a model into a trace."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from assay.hooks.caches import CacheTracker
from assay.hooks.in_place_changes import InPlaceChanges, write_injected
from assay.hooks.module_tracer import ActiveCall
from assay.hooks.values.boundary import Boundary
from assay.hooks.values.nested import constants, iterate_tensors, map_tensors
from assay.hooks.values.tensor_map import TensorMap
from assay.sites import Call
from assay.trace import TraceWriter

# How far a row of attention probabilities in bfloat16 is from one: at most a unit roundoff for
# each of its roundings, far less than rows of anything else.
PROBABILITY_TOLERANCE = 0.02


@dataclass(slots=True)
class _Pending:
    """What is recorded of a call that has not ended.

    caches, changes: the state of its arguments when it began.
    """

    tensors: dict[str, Tensor]
    constants: dict[str, object]
    caches: dict[Any, Any]
    changes: InPlaceChanges


@dataclass
class Recorder:
    """A handler that writes every call to `writer`; values are stored and injected by `boundary`."""

    writer: TraceWriter
    boundary: Boundary = field(default_factory=Boundary)
    _known: TensorMap[Tensor] = field(default_factory=TensorMap)  # injected -> stored
    _caches: CacheTracker = field(default_factory=CacheTracker)
    _opaque: set[str | None] = field(default_factory=set)

    def enter(self, active: ActiveCall) -> None:
        """Record the arguments and replace them by the boundary's injected values."""
        if active.call.caller is None:
            self._caches.begin_root()
            self._opaque.clear()
        if active.call.caller in self._opaque or routes_rows(active.arguments):
            self._opaque.add(active.call.site.module)
        if active.call.caller in self._opaque:
            return
        tensors: dict[str, Tensor] = {}
        for name, value in active.arguments.items():
            active.arguments[name] = map_tensors(
                value,
                f"input.{name}",
                lambda port, tensor: self._record_and_inject(tensors, port, tensor),
            )
        active.state = _Pending(
            tensors,
            constants(active.arguments, "input"),
            self._caches.snapshot(active.arguments),
            InPlaceChanges(active.arguments),
        )

    def leave(self, active: ActiveCall, output: Any) -> Any:  # noqa: ANN401 - see TraceHandler
        """Record the results and what the call changed, then write the call."""
        pending: _Pending | None = active.state
        if pending is None:
            return output
        rows = active.call.rows
        length = rows.length if rows is not None else None

        def pass_result(port: str, tensor: Tensor) -> Tensor:
            if _holds_attention_probabilities(port, tensor, length):
                return tensor
            return self._record_and_inject(pending.tensors, port, tensor)

        for port, tensor in pending.changes.changed():
            if self.boundary.stored is None:
                # What was kept is the tensor itself: its value before the call is lost.
                pending.tensors.pop(f"input.{port}", None)
            self._known.forget(tensor)
            injected = self._record_and_inject(pending.tensors, f"changed.{port}", tensor)
            if injected is not tensor:
                write_injected(tensor, injected)
        output = map_tensors(output, "output", pass_result)
        for addition in self._caches.additions(active.arguments, pending.caches, length):
            injected = self._record_and_inject(pending.tensors, addition.port, addition.tensor)
            if injected is not addition.tensor:
                write_injected(addition.tensor, injected)
        call = replace(active.call, ports=tuple(pending.tensors), constants=pending.constants)
        self.writer.add(call, pending.tensors)
        return output

    def finish_root(self, active: ActiveCall) -> None:
        """Write what was recorded: what the index names survives a kill."""
        del active
        self._known.clear()
        self.writer.flush()

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

    def _record_and_inject(self, tensors: dict[str, Tensor], port: str, value: Tensor) -> Tensor:
        known = self._known.get(value)
        if known is not None:
            tensors[port] = known
            return value
        stored = self.boundary.store(value.detach())
        tensors[port] = stored
        injected = value
        rounds = value.is_floating_point() or value.is_complex()
        if self.boundary.rounded is not None and rounds:
            injected = self.boundary.injected(stored, value.dtype)
        self._known.put(injected, stored)
        return injected


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


@dataclass
class StatisticsRecorder:
    """A handler that writes minimum, maximum, mean and norm of every tensor, not its values.

    One port each: `output` becomes `output.statistics`, float64 of shape (4,).
    """

    writer: TraceWriter
    _known: TensorMap[Tensor] = field(default_factory=TensorMap)  # seen -> its statistics
    _pending: list[tuple[Call, dict[str, Tensor]]] = field(default_factory=list)

    def enter(self, active: ActiveCall) -> None:
        """Measure the arguments."""
        active.state = {}
        for name, value in active.arguments.items():
            for port, tensor in iterate_tensors(value, f"input.{name}"):
                self._measure(active.state, port, tensor)

    def leave(self, active: ActiveCall, output: Any) -> Any:  # noqa: ANN401 - see TraceHandler
        """Measure the results."""
        for port, tensor in iterate_tensors(output, "output"):
            self._measure(active.state, port, tensor)
        self._pending.append((active.call, active.state))
        return output

    def finish_root(self, active: ActiveCall) -> None:
        """Write what was measured."""
        del active
        for call, tensors in self._pending:
            self.writer.add(replace(call, ports=tuple(tensors)), tensors)
        self._pending.clear()
        self._known.clear()
        self.writer.flush()

    def _measure(self, tensors: dict[str, Tensor], port: str, value: Tensor) -> None:
        if not value.is_floating_point() or not value.numel():
            return
        known = self._known.get(value)
        if known is None:
            flat = value.detach()
            dtype = torch.promote_types(flat.dtype, torch.float32)
            low, high = torch.aminmax(flat)
            norm = torch.linalg.vector_norm(flat, dtype=dtype)
            parts = torch.stack([low.to(dtype), high.to(dtype), flat.mean(dtype=dtype), norm])
            known = parts.double().cpu()
            self._known.put(value, known)
        tensors[f"{port}.statistics"] = known
