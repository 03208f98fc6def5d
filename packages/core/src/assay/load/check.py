"""Load a model in another process, judge the comparison with its files, and write the verdict."""

from pathlib import Path

from assay.comparing.levels import conclude
from assay.comparing.loaded import judge_load
from assay.devices.detection.isolation import require_run
from assay.devices.run_string import parse_run
from assay.launch import RemoteFunction, call
from assay.load.worker import LoadAnswer, LoadRequest
from assay.runs import Progress
from assay.runs.results import write_results
from assay.verdicts import Verdict

_WORK: RemoteFunction[LoadRequest, LoadAnswer] = RemoteFunction(
    "assay.load.worker:load_and_compare"
)
_FILES = "its files"


def check_load(
    request: LoadRequest, folder: Path, progress: Progress, command: tuple[str, ...] = ()
) -> Verdict:
    """Write verdict.json and measurements.jsonl into `folder`.

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
