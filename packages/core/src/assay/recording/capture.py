"""`assay.capture`: records what a model computes, in any script."""

from collections.abc import Mapping, Sequence
from contextlib import ContextDecorator, ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from assay.errors import UsageError, name_some
from assay.files import Url, parse_location
from assay.hooks.module_tracer import (
    ActiveCall,
    ModuleTracer,
    NullHandler,
    TraceHandler,
    find_called_modules,
    find_whole_graphs,
)
from assay.hooks.values.nested import iterate_tensors
from assay.output.streams import print_error
from assay.recording.background import BackgroundWriter
from assay.recording.budget import Budget, Cost, Grade, parse_size
from assay.recording.control import Control, open_control
from assay.recording.live import LiveRecorder, OutputRecorder, StatisticsRecorder
from assay.recording.manual import RUNNING, record, rows
from assay.recording.selection import Ranges, Selection, WarmUp
from assay.recording.statistics import measure_statistics, take_values
from assay.recording.training import (
    GradientWriter,
    ParameterWriter,
    optimizer_steps,
)
from assay.runs import provenance
from assay.sites import Call, RecordedLevel, RowMap
from assay.trace import TraceWriter

_captured: WeakSet[nn.Module] = WeakSet()


class CaptureFunction:
    """What `assay.capture` is: a function, and `record` and `rows` for code that it runs around."""

    record = staticmethod(record)
    rows = staticmethod(rows)

    def __call__(  # noqa: PLR0913 - one for each option
        self,
        model: nn.Module | None,
        folder: str | Path | Url,
        *,
        level: RecordedLevel = "module",
        include: Sequence[str] = ("*",),
        exclude: Sequence[str] = (),
        steps: str | None = None,
        tokens: str | None = None,
        warmup: str | None = None,
        weights: bool = False,
        stats_only: bool = False,
        max_disk: str | None = None,
        max_seconds: float | None = None,
        max_memory: str = "256M",
        control: str | None = None,
    ) -> "Capture":
        """Record the forward calls of `model`, and in training the gradients of its results.

        Use the result in a with-statement, as a decorator, or by `start` and `stop`. Among several ranks
        of `torch.distributed`, each writes its own folder `rank-N`, and `assay.compare` reads them as one.

        model: None for code that records all by `capture.record` and counts steps by `step`.
        folder: new or empty, or a URL that fsspec opens, such as "s3://bucket/run".
        level: `module` records the tensors of every module, each distinct one once; `logits` only
            what the model itself is given and returns.
        include, exclude: globs of module paths, such as "model.layers.0.*".
        steps: numbers and ranges such as "0,100:102": optimizer steps, or forward passes without an optimizer.
        tokens: forward passes of each generation, such as "0:16"; 0 is the prefill.
        warmup: passes that are not counted: the first ones, such as "3", or those whose first tensor has
            a shape, such as "8x512".
        weights: record parameters at the beginning of each step, and their gradients.
        stats_only: keep statistics of each tensor instead of its values, see `statistics.NAMES`.
        max_disk, max_seconds: what the trace may take, such as "20G", and how long the run may wait for
            it. From half of that on, only outputs are recorded, from 90% on only statistics.
        max_memory: for copies that wait to be written.
        control: "SIGUSR1", which turns the capture off and on, or a file that holds
            {"capture": true, "tokens": "0:16"} and may change at any time.
        Raises: UsageError for a glob that no module matches, if the model is being captured already, or
            if a part of it is compiled with fullgraph=True; TraceError if the folder is not empty,
            StorageError if it cannot be written or reached. What fails later ends the capture with a
            message, and the run goes on.

        >>> with assay.capture(model, "golden"):  # doctest: +SKIP
        ...     model.generate(...)
        """
        selection = Selection(
            include,
            exclude,
            Ranges.parse(steps) if steps else None,
            Ranges.parse(tokens) if tokens else None,
            WarmUp.parse(warmup) if warmup else WarmUp(),
        )
        location = parse_location(folder)
        budget = Budget(
            location,
            parse_size(max_disk) if max_disk else None,
            max_seconds,
            "statistics" if stats_only else "everything",
        )
        memory = parse_size(max_memory)
        return Capture(
            nn.Module() if model is None else model,
            location,
            level,
            selection,
            weights,
            budget,
            memory,
            control,
        )


capture = CaptureFunction()


@dataclass
class Capture(ContextDecorator):
    """A capture of one model, from `start` to `stop`. `capture` makes it."""

    model: nn.Module
    folder: Path | Url
    level: RecordedLevel
    selection: Selection
    weights: bool
    budget: Budget
    max_memory: int
    control: str | None
    _open: ExitStack = field(default_factory=ExitStack, init=False)
    _run: "_Run | None" = field(default=None, init=False)

    def start(self) -> Self:
        """Begin to record."""
        if self.model in _captured:
            raise UsageError("this model is being captured already")
        self._require_modules()
        if whole := find_whole_graphs(self.model):
            raise UsageError(
                f"{name_some(whole)} is compiled with fullgraph=True, and a capture breaks graphs"
            )
        with ExitStack() as stack:
            rank, size = _find_rank()
            folder = self.folder / f"rank-{rank}" if size > 1 else self.folder
            trace = TraceWriter(folder, self._describe(rank, size))
            writer = stack.enter_context(BackgroundWriter(trace, self.max_memory))
            control = stack.enter_context(closing(open_control(self.control)))
            run = self._run = _Run(self, writer, control, rank)
            RUNNING.append(run)
            stack.callback(RUNNING.remove, run)
            stack.enter_context(run.tracer.attached(self.model))
            stack.enter_context(optimizer_steps(self.model, run.end_step, run.begin_step))
            stack.callback(_captured.discard, self.model)
            _captured.add(self.model)
            stack.push(run.finish)
            self._open = stack.pop_all()
        return self

    def step(self) -> None:
        """Begin the next step of what `capture.record` records outside of forward passes."""
        if self._run is not None:
            self._run.tracer.begin_manual_step()
            self._run.flush()

    def stop(self) -> None:
        """End the recording, and mark the trace as complete."""
        self._open.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open.__exit__(kind, error, traceback)

    def _require_modules(self) -> None:
        paths = find_called_modules(self.model)
        if not paths.keys() - {""}:
            return  # of code that records all by itself
        for glob in self.selection.include:
            if not any(Selection((glob,)).has_module(path) for path in paths):
                raise UsageError(f"no module of the model matches include={glob!r}")

    def _describe(self, rank: int, size: int) -> dict[str, Any]:
        return {
            "model": type(self.model).__name__,
            "level": self.level,
            "stats_only": self.budget.grade == "statistics",
            "rank": rank,
            "world_size": size,
            "environment": provenance(),
        }


class _Run:
    """A handler that passes the selected calls of a running capture on to a recorder."""

    def __init__(
        self, capture: Capture, writer: BackgroundWriter, control: Control, rank: int
    ) -> None:
        self.capture, self._writer, self._control = capture, writer, control
        self._recorders: Mapping[Grade, TraceHandler] = {
            "everything": LiveRecorder(writer),
            "outputs": OutputRecorder(writer),
            "statistics": StatisticsRecorder(writer),
            "nothing": NullHandler(),
        }
        self._recorder = self._recorders["nothing"]
        self._parameters = ParameterWriter(writer, capture.model, capture.selection)
        self._gradients = GradientWriter(writer, self.finish_backward)
        self._token = -1
        self._is_chosen = False
        self._seconds = 0.0
        self._first: Cost | None = None
        self._changes: list[str] = []
        self._is_reported = False
        self.tracer = _LiveTracer(self, rank)

    def enter(self, active: ActiveCall) -> None:
        """Record the arguments of a chosen call."""
        start = perf_counter()
        if active.call.caller is None and not active.is_recompute:
            self._begin_pass(active)
        if self._is_recorded(active.call) and not active.is_recompute:
            self._recorder.enter(active)
        self._seconds += perf_counter() - start

    def leave(self, active: ActiveCall, output: Any) -> Any:  # noqa: ANN401 - see TraceHandler
        """Record the results of a chosen call, and wait for their gradients."""
        start = perf_counter()
        if active.state is not None:
            output = self._recorder.leave(active, output)
        # What checkpointing computes again has the gradients.
        if self.capture.budget.grade == "everything" and self._is_recorded(active.call):
            self._gradients.watch(active.call, output)
        self._seconds += perf_counter() - start
        return output

    def record(self, name: str, tensor: Tensor, dims: str, rows: RowMap | None) -> None:
        """Record a tensor of the script, see `capture.record`."""
        selection, tracer = self.capture.selection, self.tracer
        is_chosen = self._is_chosen if tracer.current is not None else self._choose_manual()
        if not is_chosen or not selection.has_module(name):
            return
        call, port = tracer.begin_record(name, rows), "output"
        if self.capture.budget.grade == "statistics":
            if not tensor.is_floating_point() or not tensor.numel():
                return
            found = measure_statistics(tensor.detach())
            port, tensor = f"{port}.statistics", take_values([found])[id(found)]
        placements = {port: dims} if dims else {}
        self._writer.add(replace(call, placements=placements), {port: self._writer.keep(tensor)})

    def _choose_manual(self) -> bool:
        steps, step = self.capture.selection.steps, max(self.tracer.step, 0)
        is_in_range = steps is None or step in steps
        return is_in_range and self._control.switch.is_on and not self._report_error()

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
            print_error(f"assay: {self.capture.folder}: {text}")
        if error is None:
            self.end_step()
        self._writer.wait()
        self._report_error()

    @property
    def _has_weights(self) -> bool:
        """Return True if the parameters of this step are recorded."""
        steps = self.capture.selection.steps
        return self.capture.weights and (steps is None or self.tracer.optimizer_step in steps)

    def _is_recorded(self, call: Call) -> bool:
        is_deep_enough = call.caller is None or self.capture.level == "module"
        return (
            self._is_chosen
            and is_deep_enough
            and self.capture.selection.has_module(call.site.module)
        )

    def _begin_pass(self, active: ActiveCall) -> None:
        rows = active.call.rows
        is_prefill = rows is not None and rows.length > 1 and any(0 in of for of in rows.positions)
        self._token = 0 if is_prefill else self._token + 1
        if problem := self._control.poll():
            print_error(f"assay: {problem}")
        switch, selection = self._control.switch, self.capture.selection
        if switch.tokens is not None:
            selection = replace(selection, tokens=switch.tokens)
        self._is_chosen = (
            switch.is_on
            and not self.tracer.is_warm_up
            and not self._report_error()
            and selection.has_pass(active.call.site, self._token)
        )
        if self._is_chosen:
            self._choose_grade(active.call.site.step)

    def _choose_grade(self, step: int) -> None:
        budget = self.capture.budget
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
        if self._first is None and (self._writer.num_bytes or self._seconds):
            self._first = self._spent
            print_error(f"assay: capture takes at most {self._first} for each {unit}")

    def _report_error(self) -> bool:
        """Print once what ended the writing. Returns: whether something did."""
        if self._writer.error is not None and not self._is_reported:
            self._is_reported = True
            print_error(f"assay: capture ended, and the run goes on: {self._writer.error}")
        return self._writer.error is not None


class _LiveTracer(ModuleTracer):
    """Numbers passes of the model; in training, optimizer steps and the passes in each."""

    def __init__(self, run: _Run, rank: int) -> None:
        super().__init__(run, rank=rank)
        self._capture = run.capture
        self._num_passes = 0
        self._passes_in_step = 0
        self.is_training: bool | None = None
        self.is_warm_up = False
        self.declared_rows: RowMap | None = None
        self.optimizer_step = 0

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
        warmup = self._capture.selection.warmup
        self.is_warm_up = warmup.has_pass(self._num_passes, next(shapes, None))
        self._num_passes += 1
        super()._begin_root(arguments)
        if self.declared_rows is not None:
            self._rows, self.declared_rows = self.declared_rows, None
        if self.is_training is None:
            self.is_training = torch.is_grad_enabled() and self._capture.model.training
        if self.is_warm_up:
            self.step -= 1
        elif self.is_training:
            self.step, self.batch = self.optimizer_step, self._passes_in_step
            self._passes_in_step += 1


def _find_rank() -> tuple[int, int]:
    """Return the number of this rank, and the number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
