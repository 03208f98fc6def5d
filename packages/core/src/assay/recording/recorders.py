"""Recorders of a capture: all tensors, results, statistics, operations; in training gradients and parameters."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
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
from assay.recording.background import BackgroundWriter, QueuedTensor, take_local
from assay.recording.limits import CaptureFilter
from assay.recording.modules import (
    CallRecorder,
    OperationWatcher,
    UnfinishedCall,
    operation_name,
    read_results,
)
from assay.sites import Call, CallSite, Phase, unwrapped_path
from assay.trace.layout import dtype_name

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
