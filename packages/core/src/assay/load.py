"""`assay check load`: compare a loaded model with the files of its folder. Imports no torch."""

from pathlib import Path
from typing import Any

from pydantic import Field

from assay.devices.detection import require_run
from assay.devices.run_string import parse_run
from assay.judge.levels import conclude
from assay.judge.loaded import judge_load
from assay.launch import RemoteFunction, call
from assay.models.inspect.report import LoadReport
from assay.models.sources import RemoteCode
from assay.runs import Progress
from assay.runs.results import write_results
from assay.verdicts import Record, Verdict

_FILES = "its files"


class LoadRequest(Record):
    """A model to load and compare with its files."""

    model: str
    run: str | None = None
    """None for the host, in the dtype of the files."""
    remote_code: RemoteCode = "refuse"


class LoadAnswer(Record):
    """Comparison of the loaded model with its files, and the verdict's fields `model` and `candidate`."""

    report: LoadReport
    model: dict[str, Any]
    run: dict[str, Any]
    notes: list[str] = Field(default_factory=list)


_WORK: RemoteFunction[LoadRequest, LoadAnswer] = RemoteFunction("assay.load:load_and_compare")


def check_load(
    request: LoadRequest, folder: Path, progress: Progress, command: tuple[str, ...] = ()
) -> Verdict:
    """Load a model in another process, judge it, and write verdict.json and measurements.jsonl.

    command: the command line of this check.
    """
    if request.run is not None:
        with progress.step("looks for the devices"):
            require_run(parse_run(request.run))
    (answer,) = call(_WORK, request, folder=folder, name="load", progress=progress)
    judged = judge_load([answer.report])
    verdict = conclude(
        {"load": judged.result},
        next(iter(judged.loading), None),
        notes=[*answer.notes, *judged.result.notes],
        model=answer.model,
        reference={"run": _FILES},
        candidate=answer.run,
    )
    return write_results(verdict, judged.result.measurements, folder, command)


def load_and_compare(asked: LoadRequest, progress: Progress) -> LoadAnswer:
    """Load the requested model, and compare it with its files."""
    from assay.devices.registry import describe_run, open_run
    from assay.models import load_model
    from assay.models.inspect.inspection import inspect_load
    from assay.models.load import stored_dtype

    run = parse_run(asked.run or f"cpu/{stored_dtype(asked.model, asked.remote_code)}")
    device = open_run(run)
    progress.number_phases(2)
    with progress.step(f"loads {asked.model} on {run}"):
        loaded = load_model(
            asked.model, dtype=run.dtype, device=device.torch_device, remote_code=asked.remote_code
        )
    with progress.step("compares it with its files"):
        report = inspect_load(loaded, asked.remote_code).report
    return LoadAnswer(
        report=report,
        model={
            "name": loaded.source.reference,
            "architecture": type(loaded.model).__name__,
            "weights_hash": loaded.weights_hash,
            "tokenizer_hash": loaded.tokenizer_hash,
            "checkpoint_dtype": loaded.checkpoint_dtype,
            "num_parameters": sum(p.numel() for p in loaded.model.parameters()),
        },
        run=describe_run(device, run),
        notes=list(loaded.notes),
    )
