"""Runs the tunings of a folder, one world after the other, and judges them.

A model must have learned: the held-out loss of the mixture falls by `LEAST_FALL`, and that of none of its parts rises by
the margin of the recipe, which a mean over all parts can hide.
"""

import math
import os
import shutil
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple, TypeVar

from scipy.stats import norm
from scipy.stats import t as student_t

from assay.devices.detection import require_run
from assay.devices.run_string import parse_run
from assay.errors import UsageError
from assay.files import read_record_lines, read_sealed, refuse_link, write_sealed
from assay.judge.levels import (
    Cause,
    LevelResult,
    conclude,
    failed,
    outcome_of_levels,
    passed,
)
from assay.launch import RemoteFunction, TimeLimits, World, call
from assay.runs import Progress, RunFolder, provenance
from assay.runs.folders import locked
from assay.runs.results import write_results
from assay.training.check import PRELOAD
from assay.verdicts import Measurement, Outcome, Verdict
from assay_bench.results import UNDERPOWERED, measurement, undecided_levels, underpowered
from assay_bench.tuning.records import (
    LOSSES_FILE,
    RECORD_FILE,
    Measured,
    ModelStart,
    StepLoss,
    TuneTask,
    TuningRecipe,
    TuningRecord,
    checkpoint_folder,
    go_back_to_checkpoint,
    model_folder,
    tuning_folder,
)

# In nats per token: 1 % of the perplexity. Another dtype alone moves this mean by 0.0002 (micro:llama, bfloat16
# against float32), and any learning rate lets it fall by some digit.
LEAST_FALL = 0.01
# Chance that a model passes that learned nothing, or whose held-out loss rises by the margin.
SIGNIFICANCE = 0.01
# Chance that the reported number of rows decides, as for scores (assay_bench.results).
_POWER = 0.8


def judge_tunings(tunings: Sequence[TuningRecord]) -> tuple[Verdict, list[Measurement]]:
    """Judge what each tuning learned."""
    levels: dict[str, LevelResult] = {}
    rows: list[Measurement] = []
    for tuning in tunings:
        title = tuning.title
        for name, part in held_out_parts(tuning).items():
            levels[f"{title}: {name}"] = judge_held_out(part, tuning)
            before, after = fmean(part.before), fmean(part.after)
            rows.append(
                measurement(f"{title}: {name}", "held-out", "loss", actual=after, expected=before)
            )
    has_non_finite = any(not math.isfinite(one.loss) for tuning in tunings for one in tuning.losses)
    verdict = conclude(
        levels,
        Cause("non-finite") if has_non_finite else None,
        model={"name": ", ".join(dict.fromkeys(one.model for one in tunings))},
        reference={"run": "the model before tuning"},
        candidate={"run": ", ".join(dict.fromkeys(one.recipe.run for one in tunings))},
        notes=[
            # The message gives the reasons of all other levels.
            *(
                f"{n}: {one.level.reason}"
                for n, one in levels.items()
                if one.level.verdict is Outcome.PASS
            ),
            *(
                f"{tuning.title}: {sum(one.tokens for one in tuning.losses):,} tokens in"
                f" {sum(one.seconds for one in tuning.losses):.0f} s"
                for tuning in tunings
            ),
        ],
        compared_unit="losses",
        headline=_headline(levels),
    )
    return verdict, rows


def _headline(levels: Mapping[str, LevelResult]) -> str | None:
    if undecided := undecided_levels(levels):
        return (
            f"{UNDERPOWERED}: too few held-out rows to decide these levels: {', '.join(undecided)}."
        )
    if outcome_of_levels({name: one.level for name, one in levels.items()}) is not Outcome.PASS:
        return None
    return "Each tuned model learned its mixture and kept each source."


class HeldOutPart(NamedTuple):
    """Losses of held-out rows, in nats per token."""

    before: list[float]
    after: list[float]
    margin: float
    """Largest acceptable rise; the least required fall if negative."""


def held_out_parts(record: TuningRecord) -> dict[str, HeldOutPart]:
    """Return the mixture, weighted by the shares, which must be learned, and each source of it."""
    shares = record.recipe.shares

    def mixed(held_out: dict[str, list[float]]) -> list[float]:
        weighted = [[share * loss for loss in held_out[name]] for name, share in shares.items()]
        return [sum(column) for column in zip(*weighted, strict=True)]

    start, end = record.start.held_out, record.end.held_out
    return {"learned": HeldOutPart(mixed(start), mixed(end), -LEAST_FALL)} | {
        f"held-out {one.source}": HeldOutPart(start[one.source], end[one.source], one.margin)
        for one in record.recipe.data
    }


def judge_held_out(part: HeldOutPart, tuning: TuningRecord) -> LevelResult:
    """Return PASS if a rise of the held-out loss by the margin is excluded, and FAIL if it is shown."""
    for one in tuning.losses:
        if not math.isfinite(one.loss):
            reason = f"the loss of step {one.step} is {one.loss}"
            return failed(one.step + 1, reason)
    before, after, num_rows = fmean(part.before), fmean(part.after), len(part.before)
    found = (
        f"held-out loss {before:.4f} before and {after:.4f} nats per token after {len(tuning.losses)} steps"
        f" (perplexity {_perplexity(before)} -> {_perplexity(after)})"
    )
    changes = [now - was for was, now in zip(part.before, part.after, strict=True)]
    if not all(map(math.isfinite, changes)):
        return failed(num_rows, found)
    mean, error = fmean(changes), stdev(changes) / math.sqrt(num_rows)
    width = float(student_t.isf(SIGNIFICANCE, num_rows - 1)) * error
    low, high, limit = mean - width, mean + width, f"the limit of {part.margin:g}"
    if high < part.margin:
        return passed(num_rows, reason=f"{found}: the change is at most {high:+.4f}, below {limit}")
    if low >= part.margin:
        return failed(num_rows, f"{found}: the change is at least {low:+.4f}, not below {limit}")
    quantiles = float(norm.isf(SIGNIFICANCE) + norm.isf(1 - _POWER))
    distance = abs(part.margin - mean) or math.ulp(1.0)
    needed = max(num_rows + 1, math.ceil(num_rows * (quantiles * error / distance) ** 2))
    return underpowered(
        f"{found}: the change is between {low:+.4f} and {high:+.4f}, on both sides of {limit}; about {needed:,} rows would decide:"
        " set held_out_rows in the recipe",
        num_rows,
    )


def _perplexity(loss: float) -> str:
    """Format a perplexity; a loss above 700 would overflow."""
    return f"{math.exp(min(loss, 700.0)):.4g}"


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


def open_folder(recipe: TuningRecipe, output: Path | None) -> Path:
    """Create a folder, or open the folder of an interrupted run of the same recipe.

    Raises: UsageError for any other folder.
    """
    if output is not None and (output / _RECIPE_FILE).is_file():
        kept = read_sealed(TuningRecipe, output / _RECIPE_FILE)
        if kept.hash != recipe.hash:
            raise UsageError(
                f"{output} holds tunings of another recipe (hash {kept.hash}, not"
                f" {recipe.hash}): name a new folder with --output"
            )
        return output
    folder = RunFolder.create("bench tune", output)
    write_sealed(folder.path / _RECIPE_FILE, recipe)
    return folder.path


def run_tunings(recipe: TuningRecipe, sources: Path, output: Path, progress: Progress) -> Verdict:
    """Run the unfinished tunings of `output`, judge all tunings, and write the verdict.

    sources: folder of the recipe's relative paths.
    output: from `open_folder`. A second run in the same folder waits for this one.
    """
    require_run(parse_run(recipe.run))
    tunings = []
    with locked(output / _LOCK):
        for model in recipe.models:
            tasks = [
                TuneTask(
                    recipe=recipe,
                    sources=sources,
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
                record = refuse_link(task.folder / RECORD_FILE)
                tunings.append(read_sealed(TuningRecord, record))
        verdict, measurements = judge_tunings(tunings)
        return write_results(verdict, measurements, output)


def _measure_start(task: TuneTask, output: Path, progress: Progress) -> ModelStart:
    """Measure a model before training. Raises: UsageError if its data or weights have changed."""
    model, folder = task.model, model_folder(output, task.model)
    task = task.model_copy(update={"folder": folder.resolve()})
    with progress.step(f"measuring {model} before training"):
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
    with progress.step(f"writing {task.title}"):
        end = _launch(_WRITE_MODEL, task, 1, progress)
    record = TuningRecord(
        recipe=recipe,
        model=task.model,
        permutation=task.permutation,
        seed=task.seed,
        start=start,
        end=end,
        candidate=candidate,
        losses=list(read_record_lines(StepLoss, folder / LOSSES_FILE)),
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
