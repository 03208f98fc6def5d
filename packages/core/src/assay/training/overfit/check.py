"""Runs both sides of `assay check train --overfit`, and judges. Importing it imports no torch."""

from dataclasses import replace
from pathlib import Path

from assay.errors import UsageError
from assay.files import read_sealed
from assay.runs import Progress, Work, ask
from assay.runs.results import CANDIDATE_FOLDER, GOLDEN_FOLDER, write_results
from assay.training.check import (
    REPORT_FILE,
    TrainCheck,
    ask_candidate,
    check_consistency,
    load_training_limits,
    load_user_code,
    options_for,
    record_report,
)
from assay.training.overfit.requests import (
    TRAINED,
    Memorization,
    OverfitCandidate,
    OverfitReference,
)
from assay.training.overfit.tracking import require_tracker, track
from assay.training.processes.requests import ReferenceRequest, TrainerRequest, TrainOptions
from assay.training.processes.work import PRELOAD
from assay.verdicts import Verdict

STEPS = 120
LORA_STEPS = 160

LEARNING_RATE = 1e-3
# Adapters need ten times the learning rate of the whole model. Source: Schulman et al., LoRA Without
# Regret, 2025.
LORA_LEARNING_RATE = 1e-2

_FEWEST_STEPS = 10

_SIDES = "assay.training.overfit.sides"
_REFERENCE: Work[ReferenceRequest, OverfitReference] = Work(f"{_SIDES}:overfit_trusted")
_CANDIDATE: Work[TrainerRequest, OverfitCandidate] = Work(f"{_SIDES}:overfit_candidate")
_MEMORIZATION: Work[ReferenceRequest, Memorization] = Work(f"{_SIDES}:measure_trained")


def overfit_options(
    options: TrainOptions, steps: int | None, learning_rate: float | None
) -> TrainOptions:
    """Return `options` for overfitting; None selects the default for the model or its adapter.

    Adapters have no dropout, which would keep them from memorizing. The run is not resumed.
    """
    lora = options.lora
    rate = LORA_LEARNING_RATE if lora else LEARNING_RATE
    update = {
        "steps": steps if steps is not None else LORA_STEPS if lora else STEPS,
        "resume_at": 1,
        "learning_rate": rate if learning_rate is None else learning_rate,
        "adapter_dropout": 0.0,
    }
    return options.model_copy(update=update)


def check_overfit(
    check: TrainCheck, folder: Path, progress: Progress, tracker: str | None = None
) -> Verdict:
    """Overfit on both sides, judge, and write verdict.json and measurements.jsonl into `folder`.

    tracker: a name in TRACKERS of `assay.training.overfit.tracking`, which gets the curves too.
    """
    _check_options(check, tracker)
    golden = folder / GOLDEN_FOLDER
    shapes = load_user_code(check, folder, progress).pipeline_shapes
    check = replace(check, options=options_for(check.options, check.mesh, check.features, shapes))
    record_overfit(check, golden, progress)
    return check_overfit_candidate(check, golden, folder, progress, tracker)


def record_overfit(check: TrainCheck, golden: Path, progress: Progress) -> None:
    """Overfit yardstick and noise run in a separate process, and record them in `golden`."""
    record_report(_REFERENCE, "overfit-reference", check, golden, progress)


def check_overfit_candidate(
    check: TrainCheck, golden: Path, folder: Path, progress: Progress, tracker: str | None = None
) -> Verdict:
    """Overfit the candidate, judge it against a recorded golden, and write both files."""
    from assay.training.overfit.evidence import OverfitEvidence, why_not_overfit
    from assay.training.overfit.verdict import judge_overfit

    reference = read_sealed(OverfitReference, golden / REPORT_FILE)
    limits = load_training_limits(check.limits)
    evidence = OverfitEvidence(
        check.dtype, check.options.lora, reference, limits, allow_unused=check.allow_unused
    )
    if why_not_overfit(evidence) is None:
        candidates = ask_candidate(_CANDIDATE, "overfit-candidate", check, golden, folder, progress)
        trained = ReferenceRequest(
            options=check.options,
            reference=check.reference,
            dtype=check.dtype,
            folder=str(folder / CANDIDATE_FOLDER / TRAINED),
        )
        memorization = ask(
            _MEMORIZATION, trained, folder, name="memorization", progress=progress, preload=PRELOAD
        ).result
        evidence = replace(evidence, candidates=candidates, memorization=memorization)
    verdict, measurements = judge_overfit(evidence)
    candidate = verdict.candidate or {"run": check.candidate}
    verdict = verdict.model_copy(update={"candidate": candidate})
    verdict = write_results(verdict, measurements, folder, check.command)
    if tracker is not None:
        facts = {"model": check.options.model, "candidate": check.candidate}
        curves = {"yardstick": reference.yardstick, "noise": reference.noise}
        if evidence.candidates:
            curves = {"candidate": evidence.curve} | curves
        where = track(tracker, curves, folder, facts)
        progress.note(f"curves for {tracker}: {where}")
    return verdict


def _check_options(check: TrainCheck, tracker: str | None) -> None:
    """Raise UsageError, before anything is computed, for options that cannot be checked."""
    if tracker is not None:
        require_tracker(tracker)
    if check.options.steps < _FEWEST_STEPS:
        raise UsageError(
            f"--overfit-steps {check.options.steps}: nothing is memorized in fewer than"
            f" {_FEWEST_STEPS} steps"
        )
    check_consistency(check)
