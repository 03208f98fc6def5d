"""Tunings in a folder: one world after the other, continued after an interruption."""

import os
import shutil
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from assay.devices.detection import require_run
from assay.devices.run_string import parse_run
from assay.errors import UsageError
from assay.files import file_digest, read_sealed, write_sealed
from assay.launch import RemoteFunction, TimeLimits, World, call
from assay.runs import Progress, RunFolder, provenance
from assay.runs.folders import locked
from assay.runs.results import write_results
from assay.training.check import PRELOAD
from assay.verdicts import Verdict
from assay_bench.tuning.judging import judge_tunings
from assay_bench.tuning.recipe import RecipeFile, TuningRecipe
from assay_bench.tuning.records import (
    LOSSES_FILE,
    RECORD_FILE,
    Measured,
    ModelStart,
    TuneTask,
    TuningRecord,
    checkpoint_folder,
    go_back_to_checkpoint,
    model_folder,
    read_tuning,
    read_tunings,
    tuning_folder,
)

Result = TypeVar("Result")

_RECIPE_FILE, _START_FILE, _LOCK, _LOGS = "recipe.json", "start.json", "lock", "logs"

# A tuning can take days. A collective of a step never takes five minutes.
_LIMITS = TimeLimits(start_seconds=300.0, collective_seconds=300.0, body_seconds=7 * 86_400.0)

_RANK_TASKS = "assay_bench.tuning.rank_tasks"
_MEASURE_START: RemoteFunction[TuneTask, ModelStart] = RemoteFunction(
    f"{_RANK_TASKS}:measure_start"
)
_TRAIN: RemoteFunction[TuneTask, dict[str, Any]] = RemoteFunction(f"{_RANK_TASKS}:train")
_WRITE_MODEL: RemoteFunction[TuneTask, Measured] = RemoteFunction(f"{_RANK_TASKS}:write_model")


def open_folder(recipe_file: RecipeFile, output: Path | None) -> Path:
    """Create a folder, or open the folder of an interrupted run of the same recipe.

    Raises: UsageError for any other folder.
    """
    if output is not None and (output / _RECIPE_FILE).is_file():
        kept = read_sealed(TuningRecipe, output / _RECIPE_FILE)
        if kept.hash != recipe_file.recipe.hash:
            raise UsageError(
                f"{output} holds tunings of another recipe (hash {kept.hash}, not"
                f" {recipe_file.recipe.hash}): name a new folder with --output"
            )
        return output
    folder = RunFolder.create("bench tune", output)
    write_sealed(folder.path / _RECIPE_FILE, recipe_file.recipe)
    return folder.path


def run_tunings(
    recipe_file: RecipeFile, output: Path, baseline: Path | None, progress: Progress
) -> Verdict:
    """Run the unfinished tunings of `output`, judge all tunings, and write the verdict.

    output: from `open_folder`. A second run in the same folder waits for this one.
    baseline: output of an earlier run with several seeds.
    """
    expected = None if baseline is None else read_tunings(baseline)
    require_run(parse_run(recipe_file.recipe.run))
    recipe, tunings = recipe_file.recipe, []
    with locked(output / _LOCK):
        for model in recipe.models:
            tasks = [
                TuneTask(
                    recipe=recipe,
                    sources=recipe_file.folder,
                    model=model,
                    permutation=permutation,
                    seed=seed,
                    folder=tuning_folder(output, model, permutation, seed).resolve(),
                )
                for permutation, seed in product(recipe.permutations, recipe.seeds)
            ]
            start = _measure_start(tasks[0], output, progress)
            for task in tasks:
                if not (task.folder / RECORD_FILE).is_file():
                    _tune(task, start, progress)
                tunings.append(read_tuning(task.folder))
        verdict, measurements = judge_tunings(tunings, expected)
        return write_results(verdict, measurements, output)


def _measure_start(task: TuneTask, output: Path, progress: Progress) -> ModelStart:
    """Measure a model before training. Raises: UsageError if its data or weights have changed."""
    model, folder = task.model, model_folder(output, task.model)
    task = task.model_copy(update={"folder": folder.resolve()})
    with progress.step(f"measures {model} before training"):
        start = _launch(_MEASURE_START, task, 1, progress)
    kept = folder / _START_FILE
    if kept.is_file():
        before = read_sealed(ModelStart, kept)
        if (before.data_hash, before.weights_hash) != (start.data_hash, start.weights_hash):
            raise UsageError(
                f"{output}: the data or weights of {model} have changed since its first tuning: name a"
                " new folder with --output"
            )
    write_sealed(kept, start)
    return start


def _tune(task: TuneTask, start: ModelStart, progress: Progress) -> None:
    """Train from the newest checkpoint, write the model, and write the record last."""
    folder, recipe = task.folder, task.recipe
    folder.mkdir(parents=True, exist_ok=True)
    task = task.model_copy(update={"done": go_back_to_checkpoint(folder)})
    candidate = _launch(_TRAIN, task, task.way.ranks, progress)
    with progress.step(f"writes {task.title}"):
        end = _launch(_WRITE_MODEL, task, 1, progress)
    record = TuningRecord(
        recipe_hash=recipe.hash,
        recipe=recipe,
        model=task.model,
        permutation=task.permutation,
        seed=task.seed,
        start=start,
        end=end,
        candidate=candidate,
        losses_digest=file_digest(folder / LOSSES_FILE),
        provenance=provenance(),
    )
    write_sealed(folder / RECORD_FILE, record)
    shutil.rmtree(checkpoint_folder(folder, recipe.steps).parent)


def _launch(
    function: RemoteFunction[TuneTask, Result], task: TuneTask, num_ranks: int, progress: Progress
) -> Result:
    """Call `function` on `num_ranks` data-parallel ranks. Returns: rank 0's result."""
    logs = task.folder / _LOGS
    logs.mkdir(parents=True, exist_ok=True)
    world = World(
        {"dp": num_ranks},
        parse_run(task.recipe.run).device,
        threads=max(1, (os.cpu_count() or 1) // num_ranks),
        limits=_LIMITS,
        preload=(*PRELOAD, _RANK_TASKS),
    )
    return call(function, task, world=world, folder=logs, progress=progress)[0]
