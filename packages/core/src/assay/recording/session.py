"""`assay.capture`: recording whatever runs inside a with-statement."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from assay.hooks.module_tracer import ActiveCall, ModuleTracer, TraceHandler
from assay.recording.modules import Recorder, StatisticsRecorder
from assay.runs import provenance
from assay.sites import RecordedLevel
from assay.trace import TraceWriter


@dataclass
class _RootOnly:
    """Passes the calls of the model itself to `handler`, and none of its modules'."""

    handler: TraceHandler

    def enter(self, active: ActiveCall) -> None:
        if active.call.caller is None:
            self.handler.enter(active)

    def leave(self, active: ActiveCall, output: Any) -> Any:  # noqa: ANN401 - see TraceHandler
        return self.handler.leave(active, output) if active.call.caller is None else output

    def finish_root(self, active: ActiveCall) -> None:
        self.handler.finish_root(active)


@contextmanager
def capture(
    model: nn.Module,
    folder: str | Path,
    *,
    level: RecordedLevel = "module",
    stats_only: bool = False,
) -> Iterator[None]:
    """Record every forward call that `model` makes inside the with-statement.

    level: `module` records the tensors of every module, each distinct one once; `logits` only
        what the model itself is given and returns.
    stats_only: keep minimum, maximum, mean and norm of each tensor instead of its values.
    Raises: TraceError if the folder is not empty, StorageError if the disk is full.

    >>> with assay.capture(model, "golden"):  # doctest: +SKIP
    ...     model.generate(...)
    """
    manifest: dict[str, Any] = {
        "model": type(model).__name__,
        "level": level,
        "stats_only": stats_only,
        "environment": provenance(),
    }
    with TraceWriter(folder, manifest) as writer:
        recorder: TraceHandler = StatisticsRecorder(writer) if stats_only else Recorder(writer)
        tracer = ModuleTracer(recorder if level == "module" else _RootOnly(recorder))
        with tracer.attached(model):
            yield
