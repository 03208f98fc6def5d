"""Runs a training library uninterrupted, resumed and interrupted, and judges it."""

import shutil
from collections.abc import Callable
from pathlib import Path

from assay.comparing.levels import LevelResult, rows_of
from assay.devices.registry import open_device
from assay.models.folders import local_folder
from assay.models.sources import resolve_model
from assay.runs import Progress
from assay.runs.results import write_results
from assay.verdicts import Measurement, Outcome, Verdict
from assay_smoke.external.equivalent_run import judge_equivalent
from assay_smoke.external.launch import Launch, require_runnable
from assay_smoke.external.levels import (
    judge_checkpoints,
    judge_learning_rates,
    judge_leftovers,
    judge_losses,
    judge_memory,
    judge_runs,
    judge_updates,
    notes_on_runs,
)
from assay_smoke.external.resumptions import judge_interruption, judge_resumption
from assay_smoke.external.runs import Cycle
from assay_smoke.judging import verdict_of

# The levels in the order of the verdict. The first that fails provides the cause.
_LEVELS: dict[str, Callable[[Cycle], LevelResult]] = {
    "run": judge_runs,
    "loss": judge_losses,
    "learning-rate": judge_learning_rates,
    "checkpoint": judge_checkpoints,
    "updates": judge_updates,
    "equivalent": judge_equivalent,
    "resume": judge_resumption,
    "sigterm": judge_interruption,
    "leftovers": judge_leftovers,
    "memory": judge_memory,
}
# The levels that make runs, in the order of the runs. The others judge all runs, so they come later.
_MAKE_RUNS = ("resume", "sigterm", "equivalent")


def run_external(toml: Path, folder: Path, progress: Progress) -> Verdict:
    """Run the library that `toml` describes, and judge it.

    folder: an existing one. It gets a log and the output of every run, and verdict.json. After a
        PASS, the outputs with their checkpoints are removed.
    Raises: UsageError or MachineError, with nothing left running, for a file that does not describe
        a library, and for a library that contradicts its file.
    """
    library = require_runnable(toml)
    device = open_device(library.device)
    with local_folder(resolve_model(library.model), "refuse") as model:
        first = Launch("uninterrupted", library, model, folder, toml.resolve().parent, device)
        cycle = Cycle(first, progress)
        cycle.begin()
        verdict, measurements = judge(cycle, toml)
    for one in cycle.runs:
        one.write_timeline(folder)
    verdict = write_results(verdict, measurements, folder)
    if verdict.verdict is Outcome.PASS:
        for one in cycle.runs:
            shutil.rmtree(one.launch.output, ignore_errors=True)
    return verdict


def judge(cycle: Cycle, toml: Path) -> tuple[Verdict, list[Measurement]]:
    """Make the remaining runs and judge all levels."""
    found = {name: _LEVELS[name](cycle) for name in _MAKE_RUNS}
    measurements = rows_of(found)
    found = {name: found.get(name) or judge_level(cycle) for name, judge_level in _LEVELS.items()}
    causes = (one.cause for one in found.values() if one.level.verdict is Outcome.FAIL)
    ratios = [row for row in measurements if row.statistic != "exact"]
    worst = max(ratios, key=lambda row: row.ratio / (row.limit or 1.0), default=None)
    library = cycle.library
    verdict = verdict_of(
        found,
        next(causes, None),
        model={"name": library.model},
        reference={"run": "the uninterrupted run"},
        candidate={
            "run": library.device,
            "trainer": f"command:{toml}",
            "name": library.name,
            "launch": library.launch,
        },
        notes=notes_on_runs(cycle, found),
        statistic=worst.statistic if worst else "exact",
        noise_ratio=worst.ratio if worst else None,
        limit=worst.limit if worst else 0.0,
        resolution=None if worst else 0.0,
    )
    return verdict, measurements
