"""`assay.capture`: recording whatever runs inside a with-statement."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from torch import nn

from assay.hooks.module_tracer import ModuleTracer
from assay.recording.modules import Recorder, StatisticsRecorder
from assay.runs import provenance
from assay.trace import TraceWriter


@contextmanager
def capture(
    model: nn.Module, folder: str | Path, *, level: Literal["module", "statistics"] = "module"
) -> Iterator[None]:
    """Record every forward call that `model` makes inside the with-statement.

    level: `module` keeps the tensors of every module, each distinct one once; `statistics`
        keeps minimum, maximum, mean and norm of each.
    Raises: TraceError if the folder is not empty, StorageError if the disk is full.

    >>> with assay.capture(model, "golden"):  # doctest: +SKIP
    ...     model.generate(...)
    """
    manifest: dict[str, Any] = {
        "model": type(model).__name__,
        "level": level,
        "environment": provenance(),
    }
    with TraceWriter(folder, manifest) as writer:
        kind = Recorder if level == "module" else StatisticsRecorder
        tracer = ModuleTracer(kind(writer))
        with tracer.attached(model):
            yield
