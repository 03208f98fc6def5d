"""Recorders of a capture: all tensors, results, statistics, operations; in training gradients and parameters.

A thread writes the trace, while the run waits for one copy of this rank's part of each tensor.
`assay.comparison.measuring.placed_parts` reads layouts: `d0[dp] d1[tp]` is a matrix with rows divided over the
mesh axis `dp`, and columns over `tp`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from threading import Condition, Thread
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from assay import kernel
from assay.hooks.module_tracer import ActiveCall, ModuleTracer, is_in_backward
from assay.hooks.suspension import suspended
from assay.hooks.tensors import TensorMap, iterate_tensors
from assay.output.streams import print_error
from assay.recording.limits import CaptureFilter
from assay.recording.modules import (
    CallRecorder,
    OperationWatcher,
    UnfinishedCall,
    operation_name,
    read_results,
)
from assay.sites import Call, CallSite, Phase, unwrapped_path
from assay.trace import Json, StorageError, TensorEntry, TraceWriter
from assay.trace.layout import dtype_name

if dist.is_available():
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor, Partial


@dataclass(frozen=True, slots=True)
class RankPart:
    """This rank's part of a tensor."""

    value: Tensor
    layout: str = ""
    """Placement over ranks; "" for a plain tensor, and if no layout can express it."""
    axes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """By mesh axis, the index of this rank and the size of the axis."""
    is_whole: bool = True
    """True if every rank holds the same values."""
    problem: str = ""
    """The reason not to record the part; "" to record it."""


def take_local(value: Tensor) -> RankPart:
    """Return this rank's part of a tensor, without autograd and communication.

    Waits for a pending collective that delivers the tensor.
    """
    if not dist.is_available() or not isinstance(value, DTensor):
        return RankPart(_wait(value))
    with torch.no_grad():
        local = _wait(value.to_local())
    mesh, placements = value.device_mesh, value.placements
    is_whole = all(one.is_replicate() for one in placements)
    place = mesh.get_coordinate()
    if place is None:
        return RankPart(local, is_whole=is_whole, problem="DTensors of a mesh without this rank")
    if others := [one for one in placements if one.is_partial() and one != Partial("sum")]:
        return RankPart(
            local, is_whole=False, problem=f"DTensors whose parts do not add up: {others[0]}"
        )
    # The shape of a mesh distinguishes axes without names.
    shape = "x".join(map(str, mesh.shape))
    names = mesh.mesh_dim_names or tuple(f"mesh-{shape}-{axis}" for axis in range(mesh.ndim))
    axes = dict(zip(names, zip(place, mesh.shape, strict=True), strict=True))
    divided = [_write_dim(dim, names, value) for dim in range(value.ndim)]
    layout = "" if None in divided else " ".join(map(str, divided))
    return RankPart(local, layout, axes, is_whole)


def _wait(value: Tensor) -> Tensor:
    """Return the values without autograd, after a pending collective.

    Before it ends they have no memory to copy, and `detach` would hide it.
    """
    if dist.is_available() and isinstance(value, AsyncCollectiveTensor):
        value = value.wait()
    return value.detach()


def _write_dim(dim: int, names: Sequence[str], value: "DTensor") -> str | None:
    """Return the word of a dim in a layout; None if a rank holds several ranges of its indices."""
    axes: list[str] = []
    inner: list[str] = []
    # The last axis is the innermost one, except that FSDP divides shards of tensor parallelism.
    num_outer = 1
    for axis, placement in reversed([*enumerate(value.placements)]):
        if placement.is_partial():
            if dim == value.ndim - 1:
                axes.insert(0, f"{names[axis]}:partial")
        elif getattr(placement, "dim", None) == dim:
            split = getattr(placement, "split_factor", 1)
            if split > 1 and (inner or split != num_outer):
                return None
            (inner if split > 1 else axes).insert(0, names[axis])
            num_outer *= value.device_mesh.shape[axis]
    axes += inner
    return f"d{dim}[{','.join(axes)}]" if axes else f"d{dim}"


_SMALLEST_BYTES = 4096


@dataclass(slots=True, eq=False)
class HostCopy:
    """A copy that the device may not have finished."""

    value: Tensor
    buffer: Tensor
    arrived: torch.Event | None

    def wait(self) -> Tensor:
        """Return the values when they have arrived."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.value


@dataclass
class HostCopies:
    """Makes copies of at most `max_bytes` at a time; `copy` waits for the release of earlier ones.

    A larger tensor waits for all others. Buffers are reused: new memory costs more than a copy.
    """

    max_bytes: int
    _free: dict[tuple[int, bool], list[Tensor]] = field(default_factory=dict)
    _used_bytes: int = 0
    _free_bytes: int = 0
    _changed: Condition = field(default_factory=Condition)

    @property
    def used_bytes(self) -> int:
        """Bytes of copies that are in use."""
        return self._used_bytes

    def copy(self, tensor: Tensor) -> HostCopy:
        """Copy a strided tensor in row-major order, on an accelerator after its queued work.

        On another stream than the current one, a later change in place could overtake the copy.
        """
        on_accelerator = tensor.device.type != "cpu"
        num_bytes = tensor.numel() * tensor.element_size()
        buffer = self._take(_round_up(num_bytes), on_accelerator)
        value = buffer[:num_bytes].view(tensor.dtype).view(tensor.shape)
        value.copy_(tensor, non_blocking=True)
        arrived = None
        if on_accelerator:
            arrived = torch.accelerator.current_stream(tensor.device).record_event()
        return HostCopy(value, buffer, arrived)

    def release(self, copy: HostCopy) -> None:
        """Return the buffer of a copy to the pool."""
        size = copy.buffer.numel()
        with self._changed:
            self._used_bytes -= size
            self._free_bytes += size
            self._free.setdefault((size, copy.arrived is not None), []).append(copy.buffer)
            self._changed.notify_all()

    def _take(self, size: int, on_accelerator: bool) -> Tensor:  # noqa: FBT001 - of private use
        with self._changed:
            self._changed.wait_for(
                lambda: self._used_bytes + size <= self.max_bytes or not self._used_bytes
            )
            self._used_bytes += size
            if free := self._free.get((size, on_accelerator)):
                self._free_bytes -= size
                return free.pop()
            if self._used_bytes + self._free_bytes > self.max_bytes:
                self._free.clear()
                self._free_bytes = 0
        return torch.empty(size, dtype=torch.uint8, pin_memory=on_accelerator)


def _round_up(num_bytes: int) -> int:
    """Round up to one of eight sizes between two powers of two."""
    step = 1 << max(num_bytes.bit_length() - 4, 0)
    return max(-(-num_bytes // step) * step, _SMALLEST_BYTES)


@dataclass(slots=True, eq=False)
class QueuedTensor:
    """A tensor whose copy is on its way to the trace."""

    layout: str = ""
    """Placement over ranks, see `RankPart`."""
    stored: TensorEntry | None = None
    """None until it is written."""


class BackgroundWriter:
    """Writes to a trace in a thread, in the order of the calls.

    max_bytes: of copies that wait to be written; `keep` blocks while they are used up.
    """

    def __init__(self, writer: TraceWriter, max_bytes: int) -> None:
        self._writer = writer
        self._copies = HostCopies(max_bytes)
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.error: Exception | None = None
        """The error that ended the writing."""
        self._left_out: list[str] = []
        self._axes: dict[str, tuple[int, int]] = {}
        self._thread = Thread(target=self._work, name="assay-capture", daemon=True)
        self._thread.start()

    def keep(self, tensor: Tensor) -> QueuedTensor:
        """Copy a tensor, which may change afterwards; of a DTensor, the part of this rank."""
        part = self.take_local(tensor)
        tensor, kept = part.value, QueuedTensor(part.layout)
        if part.problem:
            return kept
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            self.leave_out(f"left out {tensor.layout} tensors of {tensor.dtype} on {tensor.device}")
        elif self.error is None:
            copy = self._copies.copy(tensor.resolve_conj().resolve_neg())
            self._jobs.put(partial(self._store, kept, copy))
        return kept

    def take_local(self, tensor: Tensor) -> RankPart:
        """Return this rank's part of a tensor, and note the mesh in the manifest."""
        part = take_local(tensor)
        if part.problem:
            self.leave_out(f"left out {part.problem}")
        if part.axes.keys() - self._axes.keys():
            self.note("mesh_axes", {**part.axes, **self._axes})
        for name, place in part.axes.items():
            if self._axes.setdefault(name, place) != place:
                self.leave_out(f"left out a second mesh axis with the name {name}")
        return part

    def leave_out(self, reason: str) -> None:
        """Note once in the manifest that the trace lacks something."""
        if reason not in self._left_out:
            self._left_out.append(reason)
            self.note("left_out", "; ".join(self._left_out))

    def add(self, call: Call, tensors: Mapping[str, QueuedTensor]) -> None:
        """Record a finished call, see `TraceWriter.add`."""
        self._jobs.put(partial(self._add, call, dict(tensors)))

    def flush(self) -> None:
        """Make all added calls survive a kill, after the writes before."""
        self._jobs.put(self._writer.flush)

    def attach(self, name: str, tensors: Mapping[str, Tensor], table: Json) -> None:
        """Store named tensors and their table, see `TraceWriter.attach`.

        The run waits, so that the tensors need no copies.
        """
        self._jobs.put(lambda: self._writer.attach(name, tensors))
        self._jobs.put(lambda: self._writer.attach_json(f"{name}-table", table))
        self.wait()

    def note(self, name: str, value: Json) -> None:
        """Add a fact to the manifest."""
        self._jobs.put(lambda: self._writer.note(name, value))

    def wait(self) -> None:
        """Wait until everything is written."""
        waiting: SimpleQueue[None] = SimpleQueue()
        self._jobs.put(lambda: waiting.put(None))
        waiting.get()

    @property
    def num_bytes(self) -> int:
        """Bytes written, plus those of copies that wait."""
        return self._writer.num_bytes + self._copies.used_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Write all copies and end the trace. After an error it stays incomplete."""
        self._jobs.put(None)
        self._thread.join()
        error = error or self.error
        try:
            self._writer.__exit__(type(error) if error else None, error, traceback)
        except StorageError as problem:
            print_error(f"assay: the trace stays incomplete: {problem}")

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:  # noqa: BLE001 - without the thread, the run would wait forever
                self.error = self.error or error

    def _store(self, kept: QueuedTensor, copy: HostCopy) -> None:
        try:
            if self.error is None:
                kept.stored = self._writer.store(copy.wait())
        finally:
            self._copies.release(copy)

    def _add(self, call: Call, tensors: Mapping[str, QueuedTensor]) -> None:
        stored = {port: kept.stored for port, kept in tensors.items() if kept.stored is not None}
        if self.error is None:
            layouts = {port: tensors[port].layout for port in stored if tensors[port].layout}
            placements = {**layouts, **call.placements}
            self._writer.add(replace(call, ports=tuple(stored), placements=placements), stored)


TensorStatistic = Literal["min", "max", "mean", "norm", "nan", "inf", "projection", "channels"]
NAMES: tuple[TensorStatistic, ...] = get_args(TensorStatistic)


class TensorStatistics(NamedTuple):
    """The statistics of one tensor on its device, all but its channels, in the order of `NAMES`."""

    values: Tensor
    dtype: torch.dtype
    channels: int


def measure_statistics(tensor: Tensor) -> TensorStatistics:
    """Measure a floating-point tensor with at least one element.

    nan, inf: numbers of such elements.
    projection: the sum of all elements, each times a random factor of its row and one of its channel.
        Unlike a norm it depends on order and signs. The projections of two tensors with the
        difference D differ by about the norm of D.
    channels: size of the last dim. Only projections of the same width can be compared.
    """
    channels = tensor.shape[-1] if tensor.ndim else 1
    # torch has no arithmetic for float8
    values = tensor.float() if tensor.element_size() == 1 else tensor
    return TensorStatistics(kernel.summarize(values.reshape(-1, channels)), values.dtype, channels)


def take_values(found: Iterable[TensorStatistics]) -> dict[int, Tensor]:
    """Return the values by id on the host, (8,) float64, with one transfer per device."""
    by_kind: dict[tuple[torch.device, torch.dtype], dict[int, TensorStatistics]] = {}
    for one in found:
        kind = one.values.device, one.values.dtype
        by_kind.setdefault(kind, {})[id(one)] = one
    taken: dict[int, Tensor] = {}
    for alike in by_kind.values():
        rows = torch.stack([one.values for one in alike.values()]).cpu().double()
        channels = torch.tensor([[one.channels] for one in alike.values()], dtype=torch.float64)
        taken |= dict(zip(alike, torch.cat([rows, channels], 1), strict=True))
    return taken


@dataclass
class BackgroundRecorder(CallRecorder[QueuedTensor]):
    """Records every call in the background, and changes nothing."""

    writer: BackgroundWriter

    def keep(self, value: Tensor) -> tuple[QueuedTensor, Tensor]:
        """Start a copy to the trace, and return the value itself."""
        return self.writer.keep(value), value

    def leave_out(self, reason: str) -> None:
        """Note a value that is not recorded."""
        self.writer.leave_out(reason)

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


@contextmanager
def optimizer_steps(
    model: nn.Module, before: Callable[[], None], after: Callable[[], None]
) -> Iterator[None]:
    """Call `before` and `after` around each step of an optimizer of the model's parameters."""
    parameters = set(map(id, model.parameters()))

    def concerns(optimizer: Optimizer) -> bool:
        return any(
            id(one) in parameters for group in optimizer.param_groups for one in group["params"]
        )

    def run(action: Callable[[], None]) -> Callable[..., None]:
        return lambda optimizer, *_: action() if concerns(optimizer) else None

    hooks = (
        register_optimizer_step_pre_hook(run(before)),
        register_optimizer_step_post_hook(run(after)),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class GradientWriter:
    """Writes the gradients of the results of calls, at the first backward pass through them."""

    writer: BackgroundWriter
    finish_backward: Callable[[], None]
    """Runs at the end of each backward pass, when parameters have their gradients."""
    _written: set[CallSite] = field(default_factory=set)
    _arrived: dict[CallSite, tuple[Call, dict[str, QueuedTensor]]] = field(default_factory=dict)

    def watch(self, call: Call, output: Any) -> None:  # noqa: ANN401 - whatever modules return
        """Record the gradients of a call's results when they arrive."""
        for port, tensor in iterate_tensors(output, "output"):
            if tensor.requires_grad:
                tensor.register_hook(self._make_hook(call, port))

    def _make_hook(self, call: Call, port: str) -> Callable[[Tensor], None]:
        def arrive(gradient: Tensor) -> None:
            if not self._arrived:
                _call_after_backward(self._write)
            # A copy now: the engine may add other gradients to this tensor.
            self._arrived.setdefault(call.site, (call, {}))[1][port] = self.writer.keep(gradient)

        return arrive

    def _write(self) -> None:
        for site, (call, gradients) in self._arrived.items():
            if site not in self._written:
                self._written.add(site)
                self.writer.add(replace(call, site=site.backward, constants={}), gradients)
        self._arrived.clear()
        self.writer.flush()
        # Callbacks of DistributedDataParallel and FSDP, which reduce gradients, may follow this one.
        _call_after_backward(self.finish_backward)


def _call_after_backward(action: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(action)  # noqa: SLF001 - see autograd


@dataclass
class ParameterWriter:
    """Writes the parameters of modules, and their gradients before and after clipping."""

    writer: BackgroundWriter
    model: nn.Module
    filter: CaptureFilter
    _unclipped: dict[str, Tensor] = field(default_factory=dict)

    def keep_gradients(self) -> None:
        """Keep the gradients after backward, on the host, before they are clipped."""
        self._unclipped = {
            path: take_local(parameter.grad).value.to("cpu", copy=True)
            for path, parameter in self._parameters()
            if parameter.grad is not None
        }

    def write(self, step: int) -> None:
        """Write the parameters at the beginning of a step, and their gradients, if there are any."""
        rows: list[dict[str, Any]] = []
        tensors: dict[str, Tensor] = {}

        def add(path: str, phase: Phase, key: str, layout: str) -> None:
            module, _, name = path.rpartition(".")
            kind = "parameter" if phase == "forward" else "gradient"
            rows.append(
                {"module": unwrapped_path(module), "port": f"{kind}.{name}", "phase": phase,
                 "index": 0, "tensor": f"{key}.{path}", "layout": layout}
            )  # fmt: skip

        for path, parameter in self._parameters():
            part = self.writer.take_local(parameter)
            if part.problem:
                continue
            tensors[f"parameter.{path}"] = part.value
            add(path, "forward", "parameter", part.layout)
            if parameter.grad is None:
                continue
            gradient = self.writer.take_local(parameter.grad)
            if gradient.problem:
                continue
            clipped, layout = gradient.value, gradient.layout
            unclipped = self._unclipped.get(path, clipped)
            tensors[f"gradient.{path}"] = unclipped
            add(path, "backward", "gradient", layout)
            if unclipped is clipped or torch.equal(unclipped, clipped.to(unclipped.device)):
                add(path, "clip", "gradient", layout)
            else:
                tensors[f"clipped.{path}"] = clipped
                add(path, "clip", "clipped", layout)
        self._unclipped.clear()
        self.writer.attach(f"step-{step}", tensors, {"values": rows})

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for path, parameter in self.model.named_parameters():
            if self.filter.has_module(unwrapped_path(path.rpartition(".")[0])):
                yield path, parameter
