"""Recorders of a capture: every tensor, results only, statistics, operations."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from assay.hooks.module_tracer import ActiveCall, ModuleTracer, is_in_backward
from assay.hooks.suspension import suspended
from assay.hooks.values.nested import iterate_tensors
from assay.hooks.values.tensor_map import TensorMap
from assay.recording.capturing.background import BackgroundWriter, QueuedTensor
from assay.recording.modules import CallRecorder, UnfinishedCall
from assay.recording.operations import OperationWatcher, operation_name, read_results
from assay.recording.statistics import TensorStatistics, measure_statistics, take_values
from assay.sites import Call, CallSite
from assay.trace.layout import dtype_name


@dataclass
class BackgroundRecorder(CallRecorder[QueuedTensor]):
    """Records every call in the background, and changes nothing."""

    writer: BackgroundWriter

    def keep(self, value: Tensor) -> tuple[QueuedTensor, Tensor]:
        """Start a copy to the trace, and return the value itself."""
        return self.writer.keep(value), value

    def add_port(self, active: ActiveCall, port: str, value: Tensor) -> None:
        """Record another tensor of a running call, if the call is recorded."""
        if isinstance(active.state, UnfinishedCall):
            active.state.tensors[port] = self.writer.keep(value)


class OperationTap(OperationWatcher):
    """Records the results of each operation in the module call that runs it.

    Their ports are `op.NUMBER.NAME.output`: NUMBER counts operations of that name in the call.
    """

    def __init__(self, tracer: ModuleTracer, recorder: BackgroundRecorder) -> None:
        super().__init__(tracer)
        self._recorder = recorder
        self._root: CallSite | None = None
        self._counts: Counter[tuple[CallSite, str]] = Counter()

    def after_operation(self, active: ActiveCall, func: OpOverload, result: object) -> None:
        """Record the results, except of backward and recomputation."""
        if self._tracer.paused or is_in_backward() or not (results := read_results(func, result)):
            return
        site, name = active.call.site, operation_name(func)
        if active.call.caller is None and site != self._root:
            self._counts.clear()
            self._root = site
        number = self._counts[site, name]
        self._counts[site, name] += 1
        with suspended():
            for index, tensor in enumerate(results):
                port = f"op.{number}.{name}.output" + (f".{index}" if len(results) > 1 else "")
                self._recorder.add_port(active, port, tensor.detach())


@dataclass
class OutputRecorder(BackgroundRecorder):
    """Records the results of every call, and not its arguments."""

    def enter(self, active: ActiveCall) -> None:
        """Mark the call as recorded."""
        active.state = {}

    def leave(self, active: ActiveCall, output: Any) -> Any:  # noqa: ANN401 - see TraceHandler
        """Record the results."""
        tensors: dict[str, QueuedTensor] = {}
        for port, tensor in iterate_tensors(output, "output"):
            self._record(tensors, port, tensor)
        self.writer.add(active.call, tensors)
        return output


@dataclass
class StatisticsRecorder:
    """Records statistics of every tensor instead of its values.

    `output` becomes `output.statistics`, float64 of shape (8,), in the order of `statistics.NAMES`.
    They leave the device together at the end of a pass.
    """

    writer: BackgroundWriter
    _known: TensorMap[TensorStatistics] = field(default_factory=TensorMap, init=False)
    _pending: list[tuple[Call, dict[str, TensorStatistics]]] = field(
        default_factory=list, init=False
    )

    def enter(self, active: ActiveCall) -> None:
        """Measure the arguments."""
        active.state = {}
        for port, tensor in iterate_tensors(active.arguments, "input"):
            self.measure(active.state, port, tensor)

    def leave(self, active: ActiveCall, output: Any) -> Any:  # noqa: ANN401 - see TraceHandler
        """Measure the results."""
        for port, tensor in iterate_tensors(output, "output"):
            self.measure(active.state, port, tensor)
        self._pending.append((active.call, active.state))
        return output

    def finish_root(self, active: ActiveCall) -> None:
        """Write the statistics of the pass."""
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
            dtypes = {f"{port}.dtype": dtype_name(one.dtype) for port, one in found.items()}
            self.writer.add(replace(call, constants=dtypes), ports)

    def measure(self, found: dict[str, TensorStatistics], port: str, value: Tensor) -> None:
        """Add the statistics of a tensor to `found`, except of integers and of parts on ranks."""
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
