"""A capture while it runs: what of each call goes to which recorder."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from assay.files import Url
from assay.hooks.module_tracer import ActiveCall, ModuleTracer, NullHandler, TraceHandler
from assay.hooks.values.nested import iterate_tensors
from assay.output.streams import print_error
from assay.recording.background import BackgroundWriter
from assay.recording.budget import Budget, Cost, Grade
from assay.recording.control import Control
from assay.recording.live import LiveRecorder, OutputRecorder, StatisticsRecorder
from assay.recording.live_operations import OperationTap
from assay.recording.noise_runs import NoiseRun
from assay.recording.selection import Selection
from assay.recording.statistics import TensorStatistics
from assay.recording.training import GradientWriter, ParameterWriter
from assay.sites import Call, CallSite, CapturedLevel, RowMap


@dataclass(slots=True)
class CapturePlan:
    """What a capture records, and where; see `assay.capture`."""

    model: nn.Module
    folder: Path | Url
    level: CapturedLevel
    selection: Selection
    weights: bool
    budget: Budget
    max_memory: int
    control: str | None
    noise_for: Sequence[torch.dtype]


class RunningCapture:
    """A handler that passes the selected calls of a running capture on to a recorder."""

    def __init__(
        self, plan: CapturePlan, writer: BackgroundWriter, control: Control, rank: int
    ) -> None:
        self.plan, self._writer, self._control = plan, writer, control
        self._statistics = StatisticsRecorder(writer)
        everything = self._everything = LiveRecorder(writer)
        self._recorders: dict[Grade, TraceHandler] = {
            "everything": everything,
            "outputs": OutputRecorder(writer),
            "statistics": self._statistics,
            "nothing": NullHandler(),
        }
        self._recorder = self._recorders["nothing"]
        self._parameters = ParameterWriter(writer, plan.model, plan.selection)
        self._gradients = GradientWriter(writer, self.finish_backward)
        self._token = -1
        self._is_chosen = False
        self._seconds = 0.0
        self._first: Cost | None = None
        self._changes: list[str] = []
        self._is_reported = False
        self._noise_runs = [NoiseRun(plan.model, dtype) for dtype in plan.noise_for]
        self.tracer = LiveTracer(self, rank)
        self._operations = OperationTap(self.tracer, everything)

    def enter(self, active: ActiveCall) -> None:
        """Record the arguments of a chosen call."""
        start = perf_counter()
        if active.call.caller is None and not active.is_recompute:
            self._begin_pass(active)
        if self._is_recorded(active.call) and not active.is_recompute:
            self._recorder.enter(active)
            for name, value in active.arguments.items():
                self._add_noise(active, f"input.{name}", value)
        self._seconds += perf_counter() - start

    def leave(self, active: ActiveCall, output: Any) -> Any:  # noqa: ANN401 - see TraceHandler
        """Record the results of a chosen call, and wait for their gradients."""
        start = perf_counter()
        if active.state is not None:
            self._add_noise(active, "output", output)
            output = self._recorder.leave(active, output)
        # What checkpointing computes again has the gradients.
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
        if not self._is_chosen or not self.plan.selection.has_module(name):
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
            for run in self._noise_runs:
                stack.enter_context(run.attached())
            stack.enter_context(self.tracer.attached(self.plan.model))
            if self.plan.level == "op":
                stack.enter_context(self._operations)
            yield

    def declare_rows(self, rows: RowMap) -> None:
        """Take `rows` for those of the next forward pass."""
        self.tracer.declared_rows = rows

    def flush(self) -> None:
        """Make what was recorded survive a kill."""
        self._writer.flush()

    def finish_root(self, active: ActiveCall) -> None:
        """Write what was recorded."""
        start = perf_counter()
        self._recorder.finish_root(active)
        self._seconds += perf_counter() - start
        if not self.tracer.is_training:
            self._print_estimate("pass")

    def finish_backward(self) -> None:
        """Called at the end of each backward pass."""
        if self._has_weights:
            self._parameters.keep_gradients()

    def end_step(self) -> None:
        """Called before the optimizer changes the parameters."""
        if self._has_weights:
            self._parameters.write(self.tracer.optimizer_step)

    def begin_step(self) -> None:
        """Called after the optimizer has changed the parameters."""
        self.tracer.begin_optimizer_step()
        self._print_estimate("step")

    def finish(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Write the parameters as the run leaves them, and say what was left out."""
        del kind, traceback
        if num_calls := self.tracer.num_left_out:
            text = (
                f"left out {num_calls:,} module calls, which were made in a second thread or recorded"
                " into a device graph"
            )
            self._writer.leave_out(text)
            print_error(f"assay: {self.plan.folder}: {text}")
        if error is None:
            self.end_step()
        self._writer.wait()
        if not self._report_error() and not self._writer.num_bytes:
            print_error(f"assay: {self.plan.folder}: no call was recorded")

    @property
    def _has_weights(self) -> bool:
        """Return True if the parameters of this step are recorded."""
        steps = self.plan.selection.steps
        return self.plan.weights and (steps is None or self.tracer.optimizer_step in steps)

    def _is_recorded(self, call: Call) -> bool:
        is_deep_enough = call.caller is None or self.plan.level != "logits"
        return (
            self._is_chosen and is_deep_enough and self.plan.selection.has_module(call.site.module)
        )

    def _begin_pass(self, active: ActiveCall) -> None:
        rows = active.call.rows
        is_prefill = rows is not None and rows.length > 1 and any(0 in of for of in rows.positions)
        self._token = 0 if is_prefill else self._token + 1
        self._choose(active.call.site)
        if self._is_chosen and self.plan.budget.grade == "everything":
            self._repeat(active)

    def _repeat(self, active: ActiveCall) -> None:
        """Run the pass in the dtypes of `noise_for`. One that fails is left out from then on."""
        for run in tuple(self._noise_runs):
            self.tracer.paused = True
            try:
                run.repeat(active.arguments)
            except Exception as error:  # noqa: BLE001 - the script must go on
                self._noise_runs.remove(run)
                self._writer.note("noise_error", f"{run.name}: {error}")
                print_error(f"assay: recording goes on without the noise of {run.name}: {error}")
            finally:
                self.tracer.paused = False

    def _add_noise(self, active: ActiveCall, port: str, value: object) -> None:
        for run in self._noise_runs:
            for name, noise in run.measure(active, port, value):
                self._everything.add_port(active, f"{name}.noise.{run.name}", noise)

    def _choose(self, site: CallSite) -> None:
        """Choose what is recorded of a pass, or of a step without passes."""
        if problem := self._control.poll():
            print_error(f"assay: {problem}")
        switch, selection = self._control.switch, self.plan.selection
        if switch.tokens is not None:
            selection = replace(selection, tokens=switch.tokens)
        self._is_chosen = (
            switch.is_on
            and not self.tracer.is_warm_up
            and not self._report_error()
            and selection.has_pass(site, self._token)
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
        """Print once what ended the writing. Returns: whether something did."""
        if self._writer.error is not None and not self._is_reported:
            self._is_reported = True
            print_error(f"assay: capture ended, and the run goes on: {self._writer.error}")
        return self._writer.error is not None


class LiveTracer(ModuleTracer):
    """Numbers passes of the model; in training, optimizer steps and the passes in each."""

    def __init__(self, run: RunningCapture, rank: int) -> None:
        super().__init__(run, rank=rank)
        self._plan = run.plan
        self._num_passes = 0
        self._passes_in_step = 0
        self.is_training: bool | None = None
        self.is_warm_up = False
        self.declared_rows: RowMap | None = None
        self.optimizer_step = 0

    @property
    def has_passes(self) -> bool:
        """Return True once a module of the model was called."""
        return self._num_passes > 0

    def begin_optimizer_step(self) -> None:
        """Count a finished optimizer step."""
        self.optimizer_step += 1
        self._passes_in_step = 0

    def begin_manual_step(self) -> None:
        """Count a step of a script without forward passes."""
        self.step = max(self.step, 0) + 1
        self._counts.clear()

    def begin_record(self, name: str, rows: RowMap | None) -> Call:
        """Return the address of a tensor that the script records. rows: those of the pass by default."""
        self.step = max(self.step, 0)
        call = self._begin_call(name, "record")
        return call if rows is None else replace(call, rows=rows)

    def _begin_root(self, arguments: dict[str, Any]) -> None:
        shapes = (tuple(tensor.shape) for _, tensor in iterate_tensors(arguments, ""))
        warmup = self._plan.selection.warmup
        self.is_warm_up = warmup.has_pass(self._num_passes, next(shapes, None))
        self._num_passes += 1
        super()._begin_root(arguments)
        if self.declared_rows is not None:
            self._rows, self.declared_rows = self.declared_rows, None
        if self.is_training is None:
            self.is_training = torch.is_grad_enabled() and self._plan.model.training
        if self.is_warm_up:
            self.step -= 1
        elif self.is_training:
            self.step, self.batch = self.optimizer_step, self._passes_in_step
            self._passes_in_step += 1
