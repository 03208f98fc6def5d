"""`assay.capture`: recording a model in any script."""

import math
from collections.abc import Sequence
from contextlib import ContextDecorator, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_args
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from assay.devices.run_string import RUN_DTYPES
from assay.errors import UsageError, name_some
from assay.files import Url, parse_location
from assay.hooks.module_tracer import find_called_modules, find_compiled_modules
from assay.recording.limits import Budget, CaptureFilter, parse_size
from assay.recording.recorders import BackgroundWriter, optimizer_steps
from assay.recording.running_capture import CapturePlan, RunningCapture
from assay.runs import provenance
from assay.sites import CapturedLevel, RowMap
from assay.trace import TraceWriter

Positions = int | Sequence[int] | Tensor

_captured: WeakSet[nn.Module] = WeakSet()
_running: list[RunningCapture] = []


class CaptureFunction:
    """The function `assay.capture`, with functions for the script as attributes."""

    def __call__(  # noqa: PLR0913 - one for each option
        self,
        model: nn.Module | None,
        folder: str | Path | Url,
        *,
        level: CapturedLevel = "module",
        include: Sequence[str] = ("*",),
        exclude: Sequence[str] = (),
        steps: str | None = None,
        tokens: str | None = None,
        warmup: str | None = None,
        weights: bool = False,
        stats_only: bool = False,
        noise_for: str | None = None,
        max_disk: str | None = None,
        max_seconds: float | None = None,
        max_memory: str = "256M",
        control: str | None = None,
    ) -> "Capture":
        """Record the forward calls of `model`, and in training the gradients of its results.

        Use the result in a with-statement, as a decorator, or by `start` and `stop`. Each rank of
        `torch.distributed` writes a folder `rank-N`; `assay.compare` reads them as one dump.

        Args:
            model: None for code that uses only `capture.record` and counts steps by `step`.
            folder: New or empty, or a URL that fsspec opens, such as "s3://bucket/run".
            level: `module` records the tensors of every module, each distinct one once; `logits` only
                the inputs and outputs of the model; `op` also the results of every operation (aten)
                that runs in the thread of `start`.
            include, exclude: Globs of module paths, such as "model.layers.0.*".
            steps: Numbers and ranges such as "0,100:102": optimizer steps, or forward passes of a run
                without an optimizer.
            tokens: Forward passes of each generation, such as "0:16"; 0 is the prefill.
            warmup: Passes that are not counted: the first ones, such as "3", or those whose first tensor
                has a shape, such as "8x512".
            weights: Record parameters at the beginning of each step, and their gradients.
            stats_only: Record statistics of each tensor instead of its values, see `statistics.NAMES`.
            noise_for: Dtypes of candidates, such as "bfloat16". A copy of the model repeats each pass in
                each dtype, and the trace keeps the errors, by which `assay.compare` judges. One rank.
            max_disk, max_seconds: Limits on the size of the trace, such as "20G", and on the time that
                the run waits for it. From half of a limit on, only outputs are recorded, from 90% on
                only statistics.
            max_memory: Limit on copies that wait to be written.
            control: A file that holds {"capture": true, "tokens": "0:16"} and may change at any time.

        Raises:
            UsageError: No module matches a glob, the model is being captured, or a part is compiled for
                level="op".
            TraceError: The folder is not empty.
            StorageError: The folder cannot be written or reached. A later error ends the capture with a
                message, and the run continues.

        >>> with assay.capture(model, "golden"):  # doctest: +SKIP
        ...     model.generate(...)
        """
        given: object = model
        if not isinstance(given, nn.Module | None):
            held = [name for name, one in vars(given).items() if isinstance(one, nn.Module)]
            hint = f", such as its attribute {held[0]}" if held else ""
            raise UsageError(f"{type(given).__name__} is not a torch.nn.Module: give one{hint}")
        if level not in get_args(CapturedLevel):
            raise UsageError(f"level={level!r}: choose from {', '.join(get_args(CapturedLevel))}")
        if max_seconds is not None and not 0 < max_seconds < math.inf:
            raise UsageError(f"max_seconds={max_seconds!r} is not a positive number")
        if noise_for and stats_only:
            raise UsageError("noise_for needs the values of tensors: leave out stats_only")
        location = parse_location(folder)
        budget = Budget(
            location,
            None if max_disk is None else parse_size(str(max_disk)),
            max_seconds,
            "statistics" if stats_only else "everything",
        )
        plan = CapturePlan(
            model=nn.Module() if model is None else model,
            folder=location,
            level=level,
            filter=CaptureFilter.parse(
                include=include, exclude=exclude, steps=steps, tokens=tokens, warmup=warmup
            ),
            weights=weights,
            budget=budget,
            max_memory=parse_size(str(max_memory)),
            control=control,
            noise_for=_parse_dtypes(noise_for or ""),
        )
        return Capture(plan)

    @staticmethod
    def record(
        name: str,
        tensor: Tensor,
        dims: str = "",
        *,
        request: int | Sequence[int] | None = None,
        positions: Positions | Sequence[Positions] = (),
    ) -> None:
        """Record a tensor that no module returns, in every running capture.

        The tensor belongs to the current forward pass, or to the current step outside of one.

        Args:
            name: Takes the place of a module path in `assay compare`.
            dims: A word for each dim, such as "b s h[tp]": h is divided over the ranks of tp.
            request, positions: As in `rows`. Inside of a forward pass, those of the pass by default.

        Raises:
            UsageError: The number of words in `dims` differs from the number of dims, or the number of
                positions from that of requests.

        >>> assay.capture.record("rotary", cos, "s h", positions=range(8))  # doctest: +SKIP
        """
        if dims and len(dims.partition("#")[0].split()) != tensor.ndim:
            raise UsageError(
                f"dims={dims!r} of {name} has to have a word for each of {tensor.ndim} dims"
            )
        of_tensor = make_rows(0 if request is None else request, positions) if positions else None
        for running in _running:
            running.record(name, tensor, dims, of_tensor)

    @staticmethod
    def rows(requests: int | Sequence[int], positions: Positions | Sequence[Positions]) -> None:
        """Set the rows of the next forward pass, which servers with continuous batching reorder.

        Args:
            requests: The request number of each row. In tensors of (tokens, channels), a row is a token.
            positions: For each row the position of its token, or of its tokens, in the request; -1 for padding.

        Raises:
            UsageError: The number of positions differs from the number of requests.

        >>> assay.capture.rows([7, 7, 7, 9], [0, 1, 2, 40])  # doctest: +SKIP
        """
        of_pass = make_rows(requests, positions)
        for running in _running:
            running.tracer.next_rows = of_pass


capture = CaptureFunction()


@dataclass
class Capture(ContextDecorator):
    """A capture of one model, from `start` to `stop`."""

    plan: CapturePlan
    folder: Path | Url = field(init=False)
    """Folder of this process's trace."""
    _open: ExitStack = field(default_factory=ExitStack, init=False)
    _run: RunningCapture | None = field(default=None, init=False)
    _trace: TraceWriter | None = field(default=None, init=False)

    def start(self) -> Self:
        """Start recording."""
        if self.plan.model in _captured:
            raise UsageError("this model is being captured already")
        self._require_modules()
        if self.plan.level == "op" and (compiled := find_compiled_modules(self.plan.model)):
            raise UsageError(f"{name_some(compiled)} is compiled: level='op' records eager code")
        with ExitStack() as stack:
            rank, size = _find_rank()
            if size > 1 and self.plan.noise_for:
                raise UsageError("noise_for copies the model, which only works in one process")
            self.folder = self.plan.folder / f"rank-{rank}" if size > 1 else self.plan.folder
            trace = self._trace = TraceWriter(self.folder, self._describe(rank, size))
            writer = stack.enter_context(BackgroundWriter(trace, self.plan.max_memory))
            run = self._run = RunningCapture(self.plan, writer, rank)
            _running.append(run)
            stack.callback(_running.remove, run)
            stack.enter_context(run.attached())
            stack.enter_context(optimizer_steps(self.plan.model, run.end_step, run.begin_step))
            stack.callback(_captured.discard, self.plan.model)
            _captured.add(self.plan.model)
            stack.push(run.finish)
            self._open = stack.pop_all()
        return self

    @property
    def is_complete(self) -> bool:
        """Return True once the capture has ended without an error, and recorded calls."""
        return self._trace is not None and self._trace.is_complete

    def step(self) -> None:
        """Begin the next step of a script without forward passes."""
        if self._run is not None:
            self._run.begin_manual_step()

    def stop(self) -> None:
        """Stop recording, and mark the trace as complete."""
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
        if type(self.plan.model) is nn.Module:
            return  # capture(None, ...): the script only uses `record`
        paths = find_called_modules(self.plan.model)
        for glob in self.plan.filter.include:
            if not any(CaptureFilter((glob,)).has_module(path) for path in paths):
                raise UsageError(f"no module of the model matches include={glob!r}")

    def _describe(self, rank: int, size: int) -> dict[str, Any]:
        return {
            "model": type(self.plan.model).__name__,
            "level": self.plan.level,
            "stats_only": self.plan.budget.grade == "statistics",
            "rank": rank,
            "world_size": size,
            "environment": provenance(),
        }


def _parse_dtypes(text: str) -> list[torch.dtype]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in RUN_DTYPES]:
        raise UsageError(f"noise_for={unknown[0]!r}: choose from {', '.join(RUN_DTYPES)}")
    return [getattr(torch, name) for name in names]


def _find_rank() -> tuple[int, int]:
    """Return the number of this rank, and the number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def make_rows(requests: int | Sequence[int], positions: Positions | Sequence[Positions]) -> RowMap:
    """Return the row map of the arguments of `rows`."""
    if isinstance(requests, int):
        requests, positions = [requests], [_list(positions)]
    of_rows = [_list(one) for one in _list(positions)]
    lengths = set(map(len, of_rows))
    if len(of_rows) != len(requests) or len(lengths) > 1:
        raise UsageError(
            f"{len(requests)} requests, but positions of {len(of_rows)} rows, with"
            f" {', '.join(map(str, sorted(lengths))) or 'no'} tokens each"
        )
    return RowMap(tuple(map(int, requests)), tuple(map(tuple, of_rows)))


def _list(value: Positions | Sequence[Positions]) -> list[int]:
    if isinstance(value, Tensor):
        value = value.tolist()
    return [value] if isinstance(value, int) else list(value)  # type: ignore[arg-type]
