"""Writing a trace in the background, while the run waits for one copy of this rank's part of each tensor.

`assay.comparison.measuring.placed_parts` reads layouts: `d0[dp] d1[tp]` is a matrix with rows divided over
the mesh axis `dp`, and columns over `tp`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from threading import Condition, Thread
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from assay.output.streams import print_error
from assay.sites import Call
from assay.trace import Json, StorageError, TensorEntry, TraceWriter

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
