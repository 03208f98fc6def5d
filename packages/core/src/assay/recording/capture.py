"""Recording the calls of a model into a trace."""

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from assay.recording.caches import CacheWatch
from assay.recording.hooks import Entry
from assay.recording.nested import constants, map_tensors
from assay.recording.rounding import Border
from assay.trace import TraceWriter


@dataclass(slots=True)
class _Pending:
    """What is known of a call that has not ended."""

    tensors: dict[str, Tensor]
    constants: dict[str, object]
    caches: dict[Any, Any]


@dataclass
class Recorder:
    """Writes every call to `writer`; values are stored and handed on as `border` says."""

    writer: TraceWriter
    border: Border = field(default_factory=Border)
    _known: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # handed on -> stored
    _caches: CacheWatch = field(default_factory=CacheWatch)

    def enter(self, entry: Entry) -> None:
        """Record the arguments and replace them by what the border hands on."""
        if entry.call.caller is None:
            self._caches.begin_root()
        tensors: dict[str, Tensor] = {}
        for name, value in entry.arguments.items():
            entry.arguments[name] = map_tensors(
                value, f"input.{name}", lambda port, tensor: self._pass(tensors, port, tensor)
            )
        entry.state = _Pending(
            tensors,
            constants(entry.arguments, "input"),
            self._caches.snapshot(entry.arguments),
        )

    def leave(self, entry: Entry, output: Any) -> Any:  # noqa: ANN401 - see Listener
        """Record the results and what the call changed, then write the call."""
        pending: _Pending = entry.state
        rows = entry.call.rows
        length = rows.length if rows is not None else None

        def pass_result(port: str, tensor: Tensor) -> Tensor:
            if _is_attention_table(port, tensor, length):
                return tensor
            return self._pass(pending.tensors, port, tensor)

        output = map_tensors(output, "output", pass_result)
        for addition in self._caches.additions(entry.arguments, pending.caches, length):
            handed_on = self._pass(pending.tensors, addition.port, addition.tensor)
            if handed_on is not addition.tensor:
                addition.tensor.copy_(handed_on)
        call = replace(entry.call, ports=tuple(pending.tensors), constants=pending.constants)
        self.writer.add(call, pending.tensors)
        return output

    def finish_root(self, entry: Entry) -> None:
        """Write what was recorded: what the index names survives a kill."""
        del entry
        self._known.clear()
        self.writer.flush()

    def _pass(self, tensors: dict[str, Tensor], port: str, value: Tensor) -> Tensor:
        known = self._known.get(id(value))
        if known is not None:
            tensors[port] = known[1]
            return value
        stored = self.border.store(value.detach())
        tensors[port] = stored
        handed_on = value
        if self.border.rounded is not None and value.is_floating_point():
            handed_on = self.border.hand_on(stored, value.dtype)
        self._known[id(handed_on)] = (handed_on, stored)
        return handed_on


def _is_attention_table(port: str, tensor: Tensor, length: int | None) -> bool:
    """Whether `tensor` holds attention probabilities beside the main result.

    They are quadratic in the length, no module's input, and only eager attention returns them.
    """
    return (
        port != "output"
        and not port.endswith(".0")
        and tensor.ndim == 4
        and tensor.shape[2] == length
        and tensor.shape[3] >= tensor.shape[2]
    )
