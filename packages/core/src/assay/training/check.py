"""`assay check train` from the outside: separate processes, one verdict, files in a folder."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from assay.comparing.limits import Limits, load_limits
from assay.devices.isolation import require_run
from assay.devices.run_string import parse_run
from assay.errors import UsageError
from assay.models.sources import resolve_model
from assay.runs import Answer, Progress, provenance, run_process
from assay.runs.folders import write_whole
from assay.training.requests import (
    CandidateReport,
    CandidateRequest,
    ReferenceReport,
    ReferenceRequest,
    TrainOptions,
)
from assay.verdicts import Measurement, Record, Verdict

WORKER = "assay.training.worker"
# What both sides import before they run: a check then pays for it once.
PRELOAD = ("assay.training.preload",)
VERDICT_FILE = "verdict.json"
MEASUREMENTS_FILE = "measurements.jsonl"

CALIBRATED = "training"


@dataclass(frozen=True, slots=True)
class TrainCheck:
    """What is checked."""

    options: TrainOptions
    reference: str
    candidate: str
    trainer: str | None = None
    setup: str | None = None
    limits: str = CALIBRATED

    @property
    def dtype(self) -> str:
        """The candidate's dtype."""
        return parse_run(self.candidate).dtype


def check_train(check: TrainCheck, folder: Path, progress: Progress) -> Verdict:
    """Run both sides, judge, and write verdict.json and measurements.jsonl into `folder`."""
    limits = load_training_limits(check.limits)
    _require_sense(check)
    golden = folder / "golden"
    golden.mkdir(parents=True, exist_ok=True)
    reference = ReferenceRequest(
        options=check.options, reference=check.reference, dtype=check.dtype, folder=str(golden)
    )
    candidate = CandidateRequest(
        options=check.options,
        candidate=check.candidate,
        golden=str(golden),
        folder=str(folder / "candidate"),
        trainer=check.trainer,
        setup=check.setup,
    )
    expected = _ask("reference", reference, folder, progress)
    actual = _ask("candidate", candidate, folder, progress)
    verdict, measurements = _judge(check, folder, expected, actual, limits)
    verdict = verdict.model_copy(
        update={"command": ["assay", *sys.argv[1:]], "environment": provenance()}
    )
    _write_measurements(folder / MEASUREMENTS_FILE, measurements)
    write_whole(folder / VERDICT_FILE, verdict.to_json())
    return verdict


def load_training_limits(name: str) -> Limits:
    """The limits called `name`; those of `training` stand beside the ones of the forward pass."""
    limits = load_limits(name)
    if name != CALIBRATED:
        return limits
    forward = load_limits()
    return Limits(name, limits.origin, forward.by_statistic | limits.by_statistic)


def _require_sense(check: TrainCheck) -> None:
    """Raise UsageError, before anything is computed, for what cannot be checked."""
    options = check.options
    if options.steps < 1:
        raise UsageError(f"--steps {options.steps}: at least one step has to be made")
    if not 1 <= options.resume_at < options.steps:
        raise UsageError(
            f"--resume-at {options.resume_at}: a run of {options.steps} steps can be resumed after"
            f" 1 to {options.steps - 1} of them"
        )
    if options.micro_batches < 1:
        raise UsageError(f"--micro-batches {options.micro_batches}: a step needs at least one")
    for run in (check.reference, check.candidate):
        require_run(parse_run(run))
    recipe = resolve_model(options.model).recipe
    if recipe is not None and recipe.masked:
        raise UsageError(
            f"{options.model} predicts no next token: there is no loss that it could be trained by"
        )


def _ask(name: str, request: Record, folder: Path, progress: Progress) -> Answer:
    return run_process(
        WORKER,
        {"kind": name, "request": request.model_dump()},
        folder,
        name=name,
        progress=progress,
        preload=PRELOAD,
    )


def _judge(
    check: TrainCheck, folder: Path, expected: Answer, actual: Answer, limits: Limits
) -> tuple[Verdict, list[Measurement]]:
    from assay.trace import Trace  # torch is not needed for --help
    from assay.training.evidence import Evidence
    from assay.training.judging import judge_training

    evidence = Evidence(
        check.options,
        check.dtype,
        ReferenceReport.model_validate(expected.result),
        CandidateReport.model_validate(actual.result),
        Trace.open(folder / "golden" / "noise"),
        Trace.open(folder / "candidate"),
        limits,
    )
    return judge_training(evidence)


def _write_measurements(path: Path, measurements: Sequence[Measurement]) -> None:
    """One JSON object a line."""
    write_whole(path, "".join(row.model_dump_json() + "\n" for row in measurements))
