"""`assay check load`: compare a loaded model with the files of its folder. Imports no torch."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from assay.devices.detection import require_run
from assay.devices.run_string import Run, parse_run
from assay.files import read_json_object
from assay.judge.levels import conclude
from assay.judge.loaded import judge_load
from assay.launch import RemoteFunction, call
from assay.models.inspect.report import LoadReport, WeightDifference
from assay.models.sources import RemoteCode
from assay.runs import Progress
from assay.runs.results import write_results
from assay.verdicts import Record, Verdict

if TYPE_CHECKING:
    from assay.models import LoadedModel
    from assay.reproduce.wrong_values import WrongValue

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
        with progress.step("looking for devices"):
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
    from assay.models.inspect.inspection import inspect_load
    from assay.models.load import IncompleteWeightsError

    progress.number_phases(2)
    run = _run_of(asked)
    device = open_run(run)
    try:
        loaded = _load(asked, run, progress)
    except IncompleteWeightsError as error:
        missing = [WeightDifference(name=one, problem="not-stored") for one in error.missing]
        report = LoadReport(compared=len(missing), weights=missing, unused=error.unused)
        name = {"name": asked.model}
        return LoadAnswer(report=report, model=name, run=describe_run(device, run))
    with progress.step("comparing it with its files"):
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


def _run_of(asked: LoadRequest) -> Run:
    from assay.models.load import stored_dtype

    return parse_run(asked.run or f"cpu/{stored_dtype(asked.model, asked.remote_code)}")


def _load(asked: LoadRequest, run: Run, progress: Progress) -> "LoadedModel":
    from assay.devices.registry import open_run
    from assay.models import load_model

    device, code = open_run(run).torch_device, asked.remote_code
    with progress.step(f"loading {asked.model} on {run}"):
        return load_model(asked.model, dtype=run.dtype, device=device, remote_code=code)


def find_wrong_values(asked: LoadRequest, progress: Progress) -> "list[WrongValue]":
    """Load the requested model, and return the weights and settings that are not its files'."""
    from assay.models.inspect.inspection import build_again, inspect_load
    from assay.models.inspect.weights import all_tensors
    from assay.models.sources import local_folder
    from assay.reproduce.wrong_values import compare_values, compare_weights

    loaded = _load(asked, _run_of(asked), progress)
    inspection = inspect_load(loaded, asked.remote_code)
    report, inspection.made = inspection.report, {}
    if any(one.problem == "not-built" for one in report.weights):
        built = dict(all_tensors(build_again(loaded, asked.remote_code)))
        inspection.made = {one.name: built[one.name] for one in report.weights if one.name in built}
    wrong = {one.name for one in report.weights if one.problem != "differs" or one.beyond_rounding}
    when = "after loading"
    weights = compare_weights(loaded.model, inspection, when)
    found = [one for one in weights if one.name in wrong]
    with local_folder(loaded.source, asked.remote_code) as folder:
        stored = read_json_object(folder / "config.json")
    for key in report.keys:
        if key.key in stored and key.problem != "unread":
            used = getattr(loaded.config, key.nearest or key.key, None)
            found += compare_values(f"config.json: {key.key}", stored[key.key], used, when)
    return found
