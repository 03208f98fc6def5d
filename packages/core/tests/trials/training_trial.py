"""Many candidates against few goldens, each checked as `assay check train` does it."""

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from assay.errors import AssayError
from assay.runs import SilentProgress
from assay.runs.results import MEASUREMENTS_FILE
from assay.training.check import (
    check_candidate,
    record_golden,
)
from assay.training.reports import TrainCheck, TrainOptions
from assay.verdicts import Outcome, Verdict
from packages.core.tests.trials.readings import (
    Reading,
    fingerprint,
    read_readings,
    worst_readings,
)

REFERENCE = "cpu/float32"


@dataclass(frozen=True)
class TrainingTrial:
    """A candidate, in the terms of `TrainCheck`."""

    name: str
    run: str
    trainer: str | None = None
    setup: str | None = None
    mesh: Mapping[str, int] = field(default_factory=dict)
    features: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrainingGroup:
    """The candidates of one golden, which lies in `folder` while they are checked."""

    options: TrainOptions
    dtype: str
    folder: Path
    trials: tuple[TrainingTrial, ...]


@dataclass(frozen=True)
class TrainingOutcome:
    """What came of a trial.

    verdict: NOT_COMPARED with the error as its note where the check came to none.
    worst: for each statistic the reading nearest to its limit, over all places.
    fingerprint: the same for two trials only if they measured the same numbers.
    """

    verdict: Verdict
    worst: Mapping[str, Reading]
    fingerprint: str
    seconds: float


def train(group: TrainingGroup) -> list[TrainingOutcome]:
    """Record the golden, check its candidates in their order, and remove all files."""
    golden = group.folder / "golden"
    noise = TrainCheck(group.options, REFERENCE, f"cpu/{group.dtype}")
    try:
        record_golden(noise, golden, SilentProgress())
        return [_check(group, trial, golden) for trial in group.trials]
    except AssayError as error:
        return [_no_verdict(error) for _ in group.trials]
    finally:
        shutil.rmtree(group.folder)  # hundreds of megabytes


def _no_verdict(error: AssayError) -> TrainingOutcome:
    """The outcome of a candidate whose check raised; other trials, of hours, go on."""
    verdict = Verdict(verdict=Outcome.NOT_COMPARED, notes=[f"no verdict: {error}"])
    return TrainingOutcome(verdict, worst_readings([]), "", 0.0)


def _check(group: TrainingGroup, trial: TrainingTrial, golden: Path) -> TrainingOutcome:
    started = time.monotonic()
    check = TrainCheck(
        group.options,
        REFERENCE,
        trial.run,
        trainer=trial.trainer,
        setup=trial.setup,
        mesh=trial.mesh,
        features=trial.features,
    )
    folder = group.folder / "candidate"
    folder.mkdir()
    try:
        verdict = check_candidate(check, golden, folder, SilentProgress())
        readings = read_readings(folder / MEASUREMENTS_FILE)
    except AssayError as error:
        return _no_verdict(error)
    finally:
        shutil.rmtree(folder)
    seconds = time.monotonic() - started
    return TrainingOutcome(verdict, worst_readings(readings), fingerprint(readings), seconds)
