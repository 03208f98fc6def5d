"""Runs both sides of `assay check train --overfit`, and judges. Importing it imports no torch."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from assay.errors import UsageError
from assay.files import read_sealed
from assay.launch import RemoteFunction, call
from assay.runs import Progress
from assay.runs.results import (
    CANDIDATE_FOLDER,
    GOLDEN_FOLDER,
    remove_recordings,
    write_results,
)
from assay.training.check import (
    PRELOAD,
    REPORT_FILE,
    ask_candidate,
    check_consistency,
    load_training_limits,
    record_report,
    with_user_code,
)
from assay.training.reports import (
    TRAINED,
    LossCurve,
    Memorization,
    OverfitCandidate,
    OverfitReference,
    TrainCheck,
    TrainOptions,
)
from assay.verdicts import Verdict

# By side, such as "candidate" and "exact-reference".
Curves = Mapping[str, LossCurve]

_PROJECT = "assay"


def require_tracker(name: str) -> None:
    """Raise UsageError if curves cannot be written for `name`; do not import it."""
    if name not in TRACKERS:
        raise UsageError(f"--track {name}: there are {', '.join(TRACKERS)}")
    spec = find_spec(name)
    # Without an origin it is a folder with the same name, such as wandb's own output folder.
    if spec is None or spec.origin is None:
        raise UsageError(
            f"--track {name}: the package {name} is not installed: pip install 'assay-core[{name}]'"
        )


def track(name: str, curves: Curves, folder: Path, facts: Mapping[str, Any]) -> Path:
    """Write `curves` and the JSON values `facts` for the tracker `name`; return their folder."""
    return TRACKERS[name](curves, folder, facts)


def _write_tensorboard(curves: Curves, folder: Path, facts: Mapping[str, Any]) -> Path:
    """Write one TensorBoard run for each side, so that they share charts."""
    from torch.utils.tensorboard.writer import SummaryWriter

    root = folder / "tensorboard"
    for side, curve in curves.items():
        writer: Any = SummaryWriter(str(root / side))
        for key, value in facts.items():
            writer.add_text(key, str(value))
        for step, (loss, norm) in enumerate(zip(curve.losses, curve.grad_norms, strict=True)):
            writer.add_scalar("loss", loss, step)
            writer.add_scalar("grad_norm", norm, step)
        writer.close()
    return root


def _write_wandb(curves: Curves, folder: Path, facts: Mapping[str, Any]) -> Path:
    """Write one run of Weights & Biases, offline unless WANDB_MODE is set."""
    # Imported by name, because types are also checked where it is not installed.
    wandb: Any = import_module("wandb")
    root = folder / "wandb"
    run: Any = wandb.init(
        project=os.environ.get("WANDB_PROJECT", _PROJECT),
        name=folder.name,
        dir=str(folder),
        mode=os.environ.get("WANDB_MODE", "offline"),
        config=dict(facts),
        # Standard output is reserved for the verdict.
        settings=wandb.Settings(silent=True, console="off"),
    )
    length = max((len(curve.losses) for curve in curves.values()), default=0)
    for step in range(length):
        row = {}
        for side, curve in curves.items():
            if step < len(curve.losses):
                row[f"loss/{side}"] = curve.losses[step]
                row[f"grad_norm/{side}"] = curve.grad_norms[step]
        run.log({key: value for key, value in row.items() if not math.isnan(value)}, step=step)
    run.finish()
    # Its service keeps writing after finish() has returned.
    wandb.teardown()
    return root


TRACKERS: Mapping[str, Callable[[Curves, Path, Mapping[str, Any]], Path]] = {
    "tensorboard": _write_tensorboard,
    "wandb": _write_wandb,
}


STEPS = 120
LORA_STEPS = 160

LEARNING_RATE = 1e-3
# Adapters need ten times the learning rate of the whole model. Source: Schulman et al., LoRA Without
# Regret, 2025.
LORA_LEARNING_RATE = 1e-2

_FEWEST_STEPS = 10

_SIDES = "assay.training.overfit.sides"
_REFERENCE: RemoteFunction[TrainCheck, OverfitReference] = RemoteFunction(
    f"{_SIDES}:overfit_trusted", PRELOAD
)
_CANDIDATE: RemoteFunction[TrainCheck, OverfitCandidate] = RemoteFunction(
    f"{_SIDES}:overfit_candidate", PRELOAD
)
_MEMORIZATION: RemoteFunction[TrainCheck, Memorization] = RemoteFunction(
    f"{_SIDES}:measure_trained", PRELOAD
)


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

    tracker: a name in TRACKERS of `assay.training.overfit.check`, which gets the curves too.
    """
    if tracker is not None:
        require_tracker(tracker)
    if check.options.steps < _FEWEST_STEPS:
        raise UsageError(
            f"--overfit-steps {check.options.steps}: nothing is memorized in fewer than"
            f" {_FEWEST_STEPS} steps"
        )
    check_consistency(check)
    golden = folder / GOLDEN_FOLDER
    check = with_user_code(check, folder, progress)
    record_overfit(check, golden, progress)
    verdict = check_overfit_candidate(check, golden, folder, progress, tracker)
    remove_recordings(folder, check.keep)
    return verdict


def record_overfit(check: TrainCheck, golden: Path, progress: Progress) -> None:
    """Overfit yardstick and noise run in a separate process, and record them in `golden`."""
    record_report(_REFERENCE, "overfit-reference", check, golden, progress)


def check_overfit_candidate(
    check: TrainCheck, golden: Path, folder: Path, progress: Progress, tracker: str | None = None
) -> Verdict:
    """Overfit the candidate, judge it against a recorded golden, and write both files."""
    from assay.training.overfit.verdict import OverfitEvidence, judge_overfit, why_not_overfit

    reference = read_sealed(OverfitReference, golden / REPORT_FILE)
    limits = load_training_limits(check.limits)
    evidence = OverfitEvidence(check, reference, limits)
    if why_not_overfit(evidence) is None:
        candidates = ask_candidate(_CANDIDATE, "overfit-candidate", check, golden, folder, progress)
        trained = replace(check, golden=golden, folder=folder / CANDIDATE_FOLDER / TRAINED)
        (memorization,) = call(
            _MEMORIZATION, trained, folder=folder, name="memorization", progress=progress
        )
        evidence = replace(evidence, candidates=candidates, memorization=memorization)
    verdict, measurements = judge_overfit(evidence)
    candidate = verdict.candidate or {"run": check.candidate}
    verdict = verdict.model_copy(update={"candidate": candidate})
    verdict = write_results(verdict, measurements, folder, check.command)
    if tracker is not None:
        facts = {"model": check.options.model, "candidate": check.candidate}
        curves = {"exact-reference": reference.yardstick, "noise": reference.noise}
        if evidence.candidates:
            curves = {"candidate": evidence.curve} | curves
        where = track(tracker, curves, folder, facts)
        progress.note(f"curves for {tracker}: {where}")
    return verdict
