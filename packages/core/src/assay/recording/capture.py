"""`assay.capture`: records what a model computes, in any script."""

from collections.abc import Sequence
from contextlib import ContextDecorator, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from assay.errors import UsageError
from assay.files import Url, parse_location
from assay.hooks.module_tracer import ActiveCall, ModuleTracer, TraceHandler, find_called_modules
from assay.recording.modules import Recorder, StatisticsRecorder
from assay.recording.selection import Ranges, Selection
from assay.recording.training import (
    GradientWriter,
    attach_parameters,
    is_in_backward,
    optimizer_steps,
)
from assay.runs import provenance
from assay.sites import Call, RecordedLevel
from assay.trace import TraceWriter

_captured: WeakSet[nn.Module] = WeakSet()


def capture(  # noqa: PLR0913 - one for each option
    model: nn.Module,
    folder: str | Path | Url,
    *,
    level: RecordedLevel = "module",
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    steps: str | None = None,
    tokens: str | None = None,
    weights: bool = False,
    stats_only: bool = False,
) -> "Capture":
    """Record the forward calls of `model`, and in training the gradients of its results.

    Use the result in a with-statement, as a decorator, or by `start` and `stop`. Among several ranks
    of `torch.distributed`, each writes its own folder `rank-N`, and `assay.compare` reads them as one.

    folder: new or empty, or a URL that fsspec opens, such as "s3://bucket/run".
    level: `module` records the tensors of every module, each distinct one once; `logits` only
        what the model itself is given and returns.
    include, exclude: globs of module paths, such as "model.layers.0.*".
    steps: numbers and ranges such as "0,100:102": optimizer steps, or forward passes without an optimizer.
    tokens: forward passes of each generation, such as "0:16"; 0 is the prefill.
    weights: record parameters at the beginning of each step, and their gradients.
    stats_only: keep minimum, maximum, mean and norm of each tensor instead of its values.
    Raises: UsageError for a glob that no module matches, or if the model is being captured already;
        TraceError if the folder is not empty, StorageError if the disk is full or a URL cannot be reached.

    >>> with assay.capture(model, "golden"):  # doctest: +SKIP
    ...     model.generate(...)
    """
    selection = Selection(
        include,
        exclude,
        Ranges.parse(steps) if steps else None,
        Ranges.parse(tokens) if tokens else None,
    )
    return Capture(model, parse_location(folder), level, selection, weights, stats_only)


@dataclass
class Capture(ContextDecorator):
    """A capture of one model, from `start` to `stop`. `capture` makes it."""

    model: nn.Module
    folder: Path | Url
    level: RecordedLevel
    selection: Selection
    weights: bool
    stats_only: bool
    _open: ExitStack = field(default_factory=ExitStack, init=False)

    def start(self) -> Self:
        """Begin to record."""
        if self.model in _captured:
            raise UsageError("this model is being captured already")
        self._require_modules()
        with ExitStack() as stack:
            rank, size = _find_rank()
            folder = self.folder / f"rank-{rank}" if size > 1 else self.folder
            writer = stack.enter_context(TraceWriter(folder, self._describe(rank, size)))
            run = _Run(self, writer, rank)
            stack.enter_context(run.tracer.attached(self.model))
            stack.enter_context(optimizer_steps(self.model, run.end_step, run.begin_step))
            stack.callback(_captured.discard, self.model)
            _captured.add(self.model)
            stack.push(run.finish)
            self._open = stack.pop_all()
        return self

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
        for glob in self.selection.include:
            if not any(Selection((glob,)).has_module(path) for path in paths):
                raise UsageError(f"no module of the model matches include={glob!r}")

    def _describe(self, rank: int, size: int) -> dict[str, Any]:
        return {
            "model": type(self.model).__name__,
            "level": self.level,
            "stats_only": self.stats_only,
            "rank": rank,
            "world_size": size,
            "environment": provenance(),
        }


class _Run:
    """A handler that passes the selected calls of a running capture on to a recorder."""

    def __init__(self, capture: Capture, writer: TraceWriter, rank: int) -> None:
        self.capture, self._writer = capture, writer
        self._recorder: TraceHandler = Recorder(writer)
        if capture.stats_only:
            self._recorder = StatisticsRecorder(writer)
        self._gradients = GradientWriter(writer)
        self._token = -1
        self._is_chosen = False
        self.tracer = _LiveTracer(self, rank)

    def enter(self, active: ActiveCall) -> None:
        """Record the arguments of a chosen call."""
        if active.call.caller is None and not active.is_recompute:
            self._begin_pass(active)
        if self._is_recorded(active.call) and not active.is_recompute:
            self._recorder.enter(active)

    def leave(self, active: ActiveCall, output: Any) -> Any:  # noqa: ANN401 - see TraceHandler
        """Record the results of a chosen call, and wait for their gradients."""
        if active.state is not None:
            output = self._recorder.leave(active, output)
        # What checkpointing computes again has the gradients.
        if not self.capture.stats_only and self._is_recorded(active.call):
            self._gradients.watch(active.call, output)
        return output

    def finish_root(self, active: ActiveCall) -> None:
        """Write what was recorded."""
        self._recorder.finish_root(active)

    def end_step(self) -> None:
        """Called before the optimizer changes the parameters."""
        self._attach_parameters()

    def begin_step(self) -> None:
        """Called after the optimizer has changed the parameters."""
        self.tracer.begin_optimizer_step()

    def finish(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Write the parameters as the run leaves them."""
        del kind, traceback
        if error is None:
            self._attach_parameters()

    def _attach_parameters(self) -> None:
        steps, step = self.capture.selection.steps, self.tracer.optimizer_step
        if self.capture.weights and (steps is None or step in steps):
            attach_parameters(self._writer, self.capture.model, self.capture.selection, step)

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
        self._is_chosen = self.capture.selection.has_pass(active.call.site, self._token)


class _LiveTracer(ModuleTracer):
    """Numbers passes of the model; in training, optimizer steps and the passes in each."""

    def __init__(self, run: _Run, rank: int) -> None:
        super().__init__(run, rank=rank)
        self._model = run.capture.model
        self._is_training: bool | None = None
        self._passes_in_step = 0
        self.optimizer_step = 0

    def begin_optimizer_step(self) -> None:
        """Count a finished optimizer step."""
        self.optimizer_step += 1
        self._passes_in_step = 0

    @property
    def is_recomputing(self) -> bool:
        """Return True in backward, where activation checkpointing calls modules again."""
        return is_in_backward()

    def _begin_root(self, arguments: dict[str, Any]) -> None:
        super()._begin_root(arguments)
        if self._is_training is None:
            self._is_training = torch.is_grad_enabled() and self._model.training
        if self._is_training:
            self.step, self.batch = self.optimizer_step, self._passes_in_step
            self._passes_in_step += 1


def _find_rank() -> tuple[int, int]:
    """Return the number of this rank, and the number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
