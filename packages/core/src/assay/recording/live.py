"""Recording the calls of a model that somebody else runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from assay.hooks.module_tracer import ActiveCall
from assay.hooks.values.nested import iterate_tensors
from assay.hooks.values.tensor_map import TensorMap
from assay.recording.background import BackgroundWriter, Kept
from assay.recording.modules import CallRecorder, Pending
from assay.recording.statistics import TensorStatistics, measure_statistics, take_values
from assay.sites import Call


@dataclass
class LiveRecorder(CallRecorder[Kept]):
    """Records every call in the background, and changes nothing."""

    writer: BackgroundWriter

    def keep(self, value: Tensor) -> tuple[Kept, Tensor]:
        """Return a copy on its way to the trace, and the value itself."""
        return self.writer.keep(value), value

    def write(self, call: Call, tensors: dict[str, Kept]) -> None:
        """Add a call to the trace."""
        self.writer.add(call, tensors)

    def flush(self) -> None:
        """Flush the trace."""
        self.writer.flush()

    def add_port(self, active: ActiveCall, port: str, value: Tensor) -> None:
        """Record another tensor of a call under way, if the call is recorded."""
        if isinstance(active.state, Pending):
            active.state.tensors[port] = self.writer.keep(value)


@dataclass
class OutputRecorder:
    """Records the results of every call, and not its arguments."""

    writer: BackgroundWriter
    _known: TensorMap[Kept] = field(default_factory=TensorMap, init=False)

    def enter(self, active: ActiveCall) -> None:
        """Wait for the results."""
        active.state = {}

    def leave(self, active: ActiveCall, output: Any) -> Any:  # noqa: ANN401 - see TraceHandler
        """Record the results."""
        tensors = {}
        for port, tensor in iterate_tensors(output, "output"):
            known = self._known.get(tensor)
            if known is None:
                known = self.writer.keep(tensor)
                self._known.put(tensor, known)
            tensors[port] = known
        self.writer.add(active.call, tensors)
        return output

    def finish_root(self, active: ActiveCall) -> None:
        """Make what was recorded survive a kill."""
        del active
        self._known.clear()
        self.writer.flush()


@dataclass
class StatisticsRecorder:
    """Records statistics of every tensor instead of its values.

    One port each: `output` becomes `output.statistics`, float64 of shape (8,), in the order of
    `statistics.NAMES`. They leave the device together, when the pass has ended.
    """

    writer: BackgroundWriter
    _known: TensorMap[TensorStatistics] = field(default_factory=TensorMap, init=False)
    _pending: list[tuple[Call, dict[str, TensorStatistics]]] = field(
        default_factory=list, init=False
    )

    def enter(self, active: ActiveCall) -> None:
        """Measure the arguments."""
        active.state = {}
        for name, value in active.arguments.items():
            for port, tensor in iterate_tensors(value, f"input.{name}"):
                self.measure(active.state, port, tensor)

    def leave(self, active: ActiveCall, output: Any) -> Any:  # noqa: ANN401 - see TraceHandler
        """Measure the results."""
        for port, tensor in iterate_tensors(output, "output"):
            self.measure(active.state, port, tensor)
        self._pending.append((active.call, active.state))
        return output

    def finish_root(self, active: ActiveCall) -> None:
        """Write what was measured."""
        del active
        self.write(self._pending)
        self._pending.clear()
        self._known.clear()
        self.writer.flush()

    def write(self, measured: Sequence[tuple[Call, dict[str, TensorStatistics]]]) -> None:
        """Write the statistics of calls."""
        values = take_values([one for _, found in measured for one in found.values()])
        kept = {key: self.writer.keep(value) for key, value in values.items()}
        for call, found in measured:
            ports = {f"{port}.statistics": kept[id(one)] for port, one in found.items()}
            self.writer.add(replace(call, constants={}), ports)

    def measure(self, found: dict[str, TensorStatistics], port: str, value: Tensor) -> None:
        """Add the statistics of a tensor to `found`. Integers, and parts on ranks, have none."""
        if not value.is_floating_point() or not value.numel():
            return
        known = self._known.get(value)
        if known is None:
            part = self.writer.take_local(value)
            if not part.is_whole:
                self.writer.leave_out("left out statistics of tensors divided over ranks")
                return
            known = measure_statistics(part.value)
            self._known.put(value, known)
        found[port] = known
