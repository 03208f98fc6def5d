"""A running capture: it chooses the passes to record and a recorder for each.

It may repeat passes in other dtypes, to record the rounding noise of every tensor.
"""

import io
import pickle
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from assay.errors import name_some
from assay.files import Url
from assay.hooks.caches import count_tokens, is_cache
from assay.hooks.module_tracer import ActiveCall, ModuleTracer, NullHandler, TraceHandler
from assay.hooks.suspension import resumed, suspended_modes
from assay.hooks.tensors import iterate_leaves, iterate_tensors, map_tensors
from assay.output.streams import print_error
from assay.recording.limits import Budget, CaptureFilter, Control, Cost, Grade
from assay.recording.recorders import (
    BackgroundRecorder,
    BackgroundWriter,
    GradientWriter,
    OperationTap,
    OutputRecorder,
    ParameterWriter,
    StatisticsRecorder,
    TensorStatistics,
)
from assay.sites import Call, CallSite, CapturedLevel, RowMap


class DtypeCopy(NullHandler):
    """A copy of a model in another dtype, which runs before each recorded pass on its arguments.

    The copy has its own key/value caches: errors of earlier tokens propagate as in a run in that dtype.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._source = model
        with suspended_modes():
            self._copy = _copy_in_dtype(model, dtype)
        self._tracer = ModuleTracer(self)
        self._values: dict[tuple[str, int, str], Tensor] = {}
        self._caches: dict[int, tuple[ref[Any], Any]] = {}

    @property
    def name(self) -> str:
        """Name of the dtype, such as `bfloat16`."""
        return str(self._dtype).removeprefix("torch.")

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Let `repeat` keep the values of each pass inside this context."""
        with self._tracer.attached(self._copy):
            yield

    def repeat(self, arguments: dict[str, Any]) -> None:
        """Run the copy on the arguments of a pass, without a change to the script's random numbers."""
        self._values.clear()
        self._follow_source()
        mine = {name: self._convert(name, value) for name, value in arguments.items()}
        rest = mine.pop("args", ())
        device = next(self._copy.parameters(), torch.empty(0)).device
        devices: dict[str, Any] = {"devices": []}
        if device.type != "cpu":
            devices = {"devices": [device], "device_type": device.type}
        with resumed(), torch.no_grad(), torch.random.fork_rng(**devices):
            self._copy(*rest, **mine)

    def enter(self, active: ActiveCall) -> None:
        """Keep the arguments of a call."""
        self._keep(active, "input", active.arguments)

    def leave(self, active: ActiveCall, output: Any) -> Any:  # noqa: ANN401 - see TraceHandler
        """Keep the results of a call."""
        self._keep(active, "output", output)
        return output

    def measure(self, active: ActiveCall, port: str, value: object) -> Iterator[tuple[str, Tensor]]:
        """Yield the error of the copy's tensors against those of the script's pass.

        Returns: port, and (3,) float64: norm of the error, norm of the tensor, number of elements.
        """
        site = active.call.site
        for name, tensor in iterate_tensors(value, port):
            found = self._values.get((site.module, site.call, name))
            if found is None or found.shape != tensor.shape or not tensor.is_floating_point():
                continue
            exact = tensor.detach().float()
            error = torch.linalg.vector_norm(found.float() - exact)
            norm = torch.linalg.vector_norm(exact)
            yield name, torch.stack([error, norm, norm.new_tensor(exact.numel())]).double()

    def _keep(self, active: ActiveCall, port: str, value: object) -> None:
        site = active.call.site
        for name, tensor in iterate_tensors(value, port):
            if tensor.is_floating_point():
                self._values[site.module, site.call, name] = tensor.detach().clone()

    def _follow_source(self) -> None:
        """Copy the parameters and buffers. Their versions do not count changes through `.data`."""
        pairs = [
            *zip(self._copy.parameters(), self._source.parameters(), strict=True),
            *zip(self._copy.buffers(), self._source.buffers(), strict=True),
        ]
        with torch.no_grad():
            for mine, theirs in pairs:
                mine.copy_(theirs)

    def _convert(self, name: str, value: Any) -> Any:  # noqa: ANN401 - any argument
        if all(
            isinstance(leaf, Tensor | bool | int | float | str | torch.dtype | None)
            for _, leaf in iterate_leaves(value, name)
        ):
            return map_tensors(value, name, lambda _, tensor: self._convert_tensor(tensor))
        known = self._caches.get(id(value))
        if (
            known is not None
            and known[0]() is value
            and count_tokens(known[1]) == count_tokens(value)
        ):
            return known[1]
        copy = self._convert_object(value)
        if is_cache(value):
            self._caches = {key: one for key, one in self._caches.items() if one[0]() is not None}
            self._caches[id(value)] = ref(value), copy
        return copy

    def _convert_tensor(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor.clone()
        limits = torch.finfo(self._dtype)  # a mask's smallest float32 would round to -inf
        return tensor.detach().clamp(limits.min, limits.max).to(self._dtype, copy=True)

    def _convert_object(self, value: object) -> Any:  # noqa: ANN401 - of the same class
        """Copy an object of any class by pickling, which gives every tensor to `persistent_id`."""
        tensors: list[Tensor] = []
        stream = io.BytesIO()

        class Pickler(pickle.Pickler):
            def persistent_id(self, part: object) -> int | None:
                if not isinstance(part, Tensor):
                    return None
                tensors.append(part)
                return len(tensors) - 1

        class Unpickler(pickle.Unpickler):
            def persistent_load(unpickler, number: int) -> Tensor:  # noqa: N805 - `self` is the outer one
                return self._convert_tensor(tensors[number])

        Pickler(stream).dump(value)
        stream.seek(0)
        return Unpickler(stream).load()


def _copy_in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Copy a model as `from_pretrained` loads it in `dtype`: non-persistent buffers keep their dtype.

    Rotary frequencies are such buffers. In bfloat16 their error would hide a wrong rotation.
    """
    copy = deepcopy(model).requires_grad_(requires_grad=False)
    kept = [
        (module._buffers, name, module._buffers[name])  # noqa: SLF001 - no public list
        for module in copy.modules()
        for name in module._non_persistent_buffers_set  # noqa: SLF001
    ]
    copy.to(dtype)
    for buffers, name, buffer in kept:
        buffers[name] = buffer
    return copy


# The module of `PipelineStage`.
_STAGE = "torch.distributed.pipelining.stage"


@dataclass(slots=True, kw_only=True)
class CapturePlan:
    """The parsed options of `assay.capture`."""

    model: nn.Module
    folder: Path | Url
    level: CapturedLevel
    filter: CaptureFilter
    weights: bool
    budget: Budget
    max_memory: int
    control: str | None
    noise_for: Sequence[torch.dtype]


class RunningCapture:
    """A handler that passes the chosen calls on to a recorder."""

    def __init__(self, plan: CapturePlan, writer: BackgroundWriter, rank: int) -> None:
        self.plan, self._writer = plan, writer
        self._control = Control(None if plan.control is None else Path(plan.control))
        self._statistics = StatisticsRecorder(writer)
        everything = self._everything = BackgroundRecorder(writer)
        self._recorders: dict[Grade, TraceHandler] = {
            "everything": everything,
            "outputs": OutputRecorder(writer),
            "statistics": self._statistics,
            "nothing": NullHandler(),
        }
        self._recorder = self._recorders["nothing"]
        self._parameters = ParameterWriter(writer, plan.model, plan.filter)
        self._gradients = GradientWriter(writer, self.finish_backward)
        self._token = -1
        self._is_chosen = False
        self._seconds = 0.0
        self._first: Cost | None = None
        self._changes: list[str] = []
        self._is_reported = False
        self._copies = [DtypeCopy(plan.model, dtype) for dtype in plan.noise_for]
        self.tracer = CaptureTracer(self, rank)
        self._operations = OperationTap(self.tracer, everything)

    def enter(self, active: ActiveCall) -> None:
        """Record the arguments of a chosen call."""
        start = perf_counter()
        if active.call.caller is None and not active.is_recompute:
            self._begin_pass(active)
        if self._is_recorded(active.call) and not active.is_recompute:
            self._recorder.enter(active)
            self._add_noise(active, "input", active.arguments)
        self._seconds += perf_counter() - start

    def leave(self, active: ActiveCall, output: Any) -> Any:  # noqa: ANN401 - see TraceHandler
        """Record the results of a chosen call, and later their gradients."""
        start = perf_counter()
        if active.state is not None:
            self._add_noise(active, "output", output)
            output = self._recorder.leave(active, output)
        # With activation checkpointing, gradients arrive at the recomputed results.
        if self.plan.budget.grade == "everything" and self._is_recorded(active.call):
            self._gradients.watch(active.call, output)
        self._seconds += perf_counter() - start
        return output

    def record(self, name: str, tensor: Tensor, dims: str, rows: RowMap | None) -> None:
        """Record a tensor of the script, see `capture.record`."""
        if self.tracer.paused:
            return
        if not self.tracer.has_passes and self._token != max(self.tracer.step, 0):
            self._token = max(self.tracer.step, 0)
            self._choose(CallSite(self._token, name))
        if not self._is_chosen or not self.plan.filter.has_module(name):
            return
        call, port = self.tracer.begin_record(name, rows), "output"
        if self.plan.budget.grade == "statistics":
            found = dict[str, TensorStatistics]()
            self._statistics.measure(found, port, tensor)
            self._statistics.write([(call, found)])
            return
        placements = {port: dims} if dims else {}
        self._writer.add(replace(call, placements=placements), {port: self._writer.keep(tensor)})

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Watch the model, and its copies in the dtypes of `noise_for`."""
        with ExitStack() as stack:
            for copy in self._copies:
                stack.enter_context(copy.attached())
            stack.enter_context(self.tracer.attached(self.plan.model))
            if self.plan.level == "op":
                stack.enter_context(self._operations)
            yield

    def begin_manual_step(self) -> None:
        """Begin the next step of a script without forward passes."""
        self.tracer.begin_manual_step()
        self._writer.flush()

    def finish_root(self, active: ActiveCall) -> None:
        """End a forward pass."""
        start = perf_counter()
        self._recorder.finish_root(active)
        self._seconds += perf_counter() - start
        if not self.tracer.is_training:
            self._print_estimate("pass")

    def finish_backward(self) -> None:
        """Keep the gradients of a backward pass."""
        if self._has_weights:
            self._parameters.keep_gradients()

    def end_step(self) -> None:
        """Write the parameters before the optimizer changes them."""
        if self._has_weights:
            self._parameters.write(self.tracer.optimizer_step)

    def begin_step(self) -> None:
        """Count a step after the optimizer has changed the parameters."""
        self.tracer.begin_optimizer_step()
        self._print_estimate("step")

    def finish(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Write the final parameters, and report calls that were left out."""
        del kind, traceback
        if num_calls := self.tracer.num_left_out:
            self._leave_out(
                f"left out {num_calls:,} module calls, which were made in a second thread or recorded"
                " into a device graph"
            )
        has_modules = self.plan.level != "logits"
        whole = [
            path or "the model"
            for path in self.tracer.in_whole_graphs
            if self.plan.filter.has_module(path) and (has_modules or not path)
        ]
        if whole:
            self._leave_out(
                f"left out calls in code compiled with fullgraph=True: {name_some(whole)}"
            )
        if num_calls := self.tracer.num_dry_runs:
            self._writer.note(
                "dry_runs", f"calls that learn shapes only, not recorded: {num_calls:,}"
            )
        if error is None:
            self.end_step()
        self._writer.wait()
        if not self._report_error() and not self._writer.num_bytes:
            print_error(f"assay: {self.plan.folder}: no call was recorded")

    def _leave_out(self, text: str) -> None:
        self._writer.leave_out(text)
        print_error(f"assay: {self.plan.folder}: {text}")

    @property
    def _has_weights(self) -> bool:
        steps = self.plan.filter.steps
        return self.plan.weights and (steps is None or self.tracer.optimizer_step in steps)

    def _is_recorded(self, call: Call) -> bool:
        has_level = call.caller is None or self.plan.level != "logits"
        return self._is_chosen and has_level and self.plan.filter.has_module(call.site.module)

    def _begin_pass(self, active: ActiveCall) -> None:
        rows = active.call.rows
        is_prefill = rows is not None and rows.length > 1 and any(0 in of for of in rows.positions)
        self._token = 0 if is_prefill else self._token + 1
        self._choose(active.call.site)
        if self._is_chosen and self.plan.budget.grade == "everything":
            self._repeat(active)

    def _repeat(self, active: ActiveCall) -> None:
        """Run the pass in the dtypes of `noise_for`. Give up a dtype that fails."""
        for copy in tuple(self._copies):
            self.tracer.paused = True
            try:
                copy.repeat(active.arguments)
            except Exception as error:  # noqa: BLE001 - the script must go on
                self._copies.remove(copy)
                self._writer.note("noise_error", f"{copy.name}: {error}")
                print_error(f"assay: recording goes on without the noise of {copy.name}: {error}")
            finally:
                self.tracer.paused = False

    def _add_noise(self, active: ActiveCall, port: str, value: object) -> None:
        for copy in self._copies:
            for name, noise in copy.measure(active, port, value):
                self._everything.add_port(active, f"{name}.noise.{copy.name}", noise)

    def _choose(self, site: CallSite) -> None:
        """Decide whether to record a pass, or a step without passes, and at which grade."""
        if problem := self._control.poll():
            print_error(f"assay: {problem}")
        chosen = self.plan.filter
        if self._control.tokens is not None:
            chosen = replace(chosen, tokens=self._control.tokens)
        self._is_chosen = (
            self._control.is_on
            and not self.tracer.is_warm_up
            and not self._report_error()
            and chosen.has_pass(site, self._token)
        )
        if self._is_chosen:
            self._choose_grade(site.step)

    def _choose_grade(self, step: int) -> None:
        budget = self.plan.budget
        if lowered := budget.lower_grade(self._spent):
            self._changes.append(f"from step {step}: {lowered}")
            self._writer.note("lowered", list(self._changes))
            print_error(f"assay: capture records {lowered}")
        self._recorder = self._recorders[budget.grade]
        self._is_chosen = budget.grade != "nothing"

    @property
    def _spent(self) -> Cost:
        return Cost(self._writer.num_bytes, self._seconds)

    def _print_estimate(self, unit: str) -> None:
        if self._first is not None or not (self._writer.num_bytes or self._seconds):
            return
        self._first = self._spent
        if self.tracer.rank == 0:
            print_error(f"assay: capture takes at most {self._first} for each {unit}")

    def _report_error(self) -> bool:
        """Print the error that ended the writing, once. Returns: True if there is one."""
        if self._writer.error is not None and not self._is_reported:
            self._is_reported = True
            print_error(f"assay: capture ended, and the run goes on: {self._writer.error}")
        return self._writer.error is not None


def _is_from_shape_inference() -> bool:
    """Return True inside of a call by which a pipeline stage learns the shapes of its tensors.

    `PipelineStage` (torch.distributed.pipelining, torch 2.7 to 2.13) calls its model once more before
    the first step, with the first micro-batch or uninitialized memory. All other calls come from its
    method `forward_one_chunk`.
    """
    if _STAGE not in sys.modules:
        return False
    frame: Any = sys._getframe()  # noqa: SLF001 - much faster than `inspect.stack`
    names = set()
    while frame is not None:
        if frame.f_globals.get("__name__") == _STAGE:
            names.add(frame.f_code.co_name)
        frame = frame.f_back
    return bool(names) and "forward_one_chunk" not in names


class CaptureTracer(ModuleTracer):
    """Numbers forward passes; in training, optimizer steps and the passes of each."""

    def __init__(self, run: RunningCapture, rank: int) -> None:
        super().__init__(run, rank=rank)
        self._plan = run.plan
        self._num_passes = 0
        self._passes_in_step = 0
        self.is_training: bool | None = None
        self.is_warm_up = False
        self.next_rows: RowMap | None = None
        """Rows of the next forward pass, see `capture.rows`."""
        self.optimizer_step = 0

    @property
    def has_passes(self) -> bool:
        """Return True once a module of the model was called."""
        return self._num_passes > 0

    def is_dry_run(self, arguments: object) -> bool:
        """Return True for a call that only learns shapes, also one on tensors without values."""
        tensors = (tensor for _, tensor in iterate_tensors(arguments, ""))
        has_values = not any(one.is_meta or isinstance(one, FakeTensor) for one in tensors)
        return not has_values or _is_from_shape_inference()

    def begin_optimizer_step(self) -> None:
        """Count an optimizer step."""
        self.optimizer_step += 1
        self._passes_in_step = 0

    def begin_manual_step(self) -> None:
        """Count a step of a script without forward passes."""
        self.step = max(self.step, 0) + 1
        self._counts.clear()

    def begin_record(self, name: str, rows: RowMap | None) -> Call:
        """Return the address of a tensor of the script. rows: those of the pass by default."""
        self.step = max(self.step, 0)
        call = self._begin_call(name, "record")
        return call if rows is None else replace(call, rows=rows)

    def _begin_root(self, path: str, module: nn.Module, arguments: dict[str, Any]) -> None:
        shapes = (tuple(tensor.shape) for _, tensor in iterate_tensors(arguments, ""))
        warmup = self._plan.filter.warmup
        self.is_warm_up = warmup.has_pass(self._num_passes, next(shapes, None))
        self._num_passes += 1
        super()._begin_root(path, module, arguments)
        if self.next_rows is not None:
            self._rows, self.next_rows = self.next_rows, None
            self._has_own_rows = False
        if self.is_training is None:
            self.is_training = torch.is_grad_enabled() and self._plan.model.training
        if self.is_warm_up:
            self.step -= 1
        elif self.is_training:
            self.step, self.batch = self.optimizer_step, self._passes_in_step
            self._passes_in_step += 1
