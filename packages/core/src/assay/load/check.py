"""Has one process load the model and compare it with its files, judges, and writes the verdict."""

from dataclasses import dataclass
from pathlib import Path

from assay.comparing.loaded import judge_load
from assay.devices.detection.isolation import require_run
from assay.devices.run_string import parse_run
from assay.load.requests import LoadAnswer, LoadRequest
from assay.runs import Progress, run_process
from assay.runs.results import write_results
from assay.verdicts import Outcome, Verdict

_WORKER = "assay.load.worker"
_FILES = "its files"


@dataclass(frozen=True, slots=True)
class LoadCheck:
    """What is checked. command: what to type for the same check."""

    request: LoadRequest
    command: tuple[str, ...] = ()


def check_load(check: LoadCheck, folder: Path, progress: Progress) -> Verdict:
    """Load, judge, and write verdict.json and measurements.jsonl into `folder`."""
    if check.request.run is not None:
        with progress.step("looks for the devices"):
            require_run(parse_run(check.request.run))
    answer = LoadAnswer.model_validate(
        run_process(
            _WORKER, check.request.model_dump(), folder, name="load", progress=progress
        ).result
    )
    judged = judge_load([answer.report])
    finding = next(iter(judged.loading), None)
    level = judged.result.level
    failed = level.verdict is Outcome.FAIL
    verdict = Verdict(
        verdict=level.verdict or Outcome.NOT_COMPARED,
        model=answer.model,
        reference={"run": _FILES},
        candidate=answer.run,
        levels={"load": level},
        location=finding.location if finding and failed else None,
        diagnosis=finding.diagnosis if finding and failed else None,
        notes=[*answer.notes, *judged.result.notes],
        compared=level.compared,
    )
    return write_results(verdict, judged.result.measurements, folder, check.command)
