"""Runs a training library uninterrupted, resumed and interrupted, and judges it level by level."""

import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path

from assay.comparing.levels import LevelResult, failed, not_compared, not_run, passed, rows_of
from assay.devices.registry import open_device
from assay.errors import name_some
from assay.models.sources import local_folder, resolve_model
from assay.runs import Progress
from assay.runs.results import write_results
from assay.verdicts import Location, Measurement, Outcome, Verdict
from assay_smoke.external.rerun_levels import (
    judge_equivalent,
    judge_interruption,
    judge_resumption,
    unit_in_log,
)
from assay_smoke.external.runs import Cycle, SavedModel
from assay_smoke.external.watched_run import Launch, require_runnable
from assay_smoke.judging import differing_keys, failed_checkpoint, failed_update, verdict_of
from assay_smoke.machine import FULL_DISK, MemoryUse

# Half a unit of the fourth significant digit. Libraries, such as transformers, log at least four.
_LOGGED_RATE = 5e-4

# Memory that a driver may keep after the processes have ended.
_DEVICE_SLACK_BYTES = 64 << 20

# Zero at the start of every adapter, so that an untrained adapter changes nothing.
_STARTS_AT_ZERO = "lora_B"

# Losses with fewer digits may be equal by rounding if all steps have the same rows.
_PRECISE = 1e-5


def judge_runs(cycle: Cycle) -> LevelResult:
    """Judge that runs from the start ended in time with exit code 0."""
    from_start = [run for run in cycle.runs if run.launch.name in ("uninterrupted", "repeated")]
    for run in from_start:
        reason = run.describe_bad_end()
        if reason is not None:
            at = Location(phase="checkpoint", step=run.steps_made)
            return failed(
                len(from_start), reason, location=at if reason.startswith(FULL_DISK) else None
            )
    return passed(len(from_start), seconds={run.launch.name: run.seconds for run in cycle.runs})


def judge_losses(cycle: Cycle) -> LevelResult:
    """Judge that losses are finite, in order, and one per step."""
    compared = sum(len(run.losses) for run in cycle.runs)
    # A library may give its first step the number 0 or 1.
    from_zero = next((loss.step == 0 for loss in cycle.uninterrupted.losses), False)
    for run in cycle.runs:
        name, first = run.launch.name, run.launch.first_step
        for number, loss in enumerate(run.losses, first + 1):
            if not math.isfinite(loss.value):
                reason = f"the loss of step {number} of the {name} run is {loss.value}"
                return failed(
                    compared, reason, "non-finite", Location(phase="forward", step=number)
                )
        logged = [loss.step for loss in run.losses if loss.step is not None]
        expected = [first + (not from_zero) + index for index in range(len(run.losses))]
        if logged and logged != expected:
            wrong = next(
                (pair for pair in zip(logged, expected, strict=False) if pair[0] != pair[1]),
                (None, None),
            )
            reason = f"the {name} run logs step {wrong[0]} where {wrong[1]} is expected"
            return failed(compared, reason)
        is_whole = run.launch.sigterm_after is None and run.ended_well
        num_expected = cycle.library.steps - first
        if is_whole and len(run.losses) != num_expected:
            reason = f"the {name} run logs {len(run.losses)} losses for {num_expected} steps"
            return failed(compared, reason)
    return passed(compared) if compared else not_run("no run logged a loss")


def judge_learning_rates(cycle: Cycle) -> LevelResult:
    """Judge that every step has the learning rate of the declared schedule."""
    expected = cycle.library.learning_rates
    if expected is None:
        return not_run("no `learning_rates` are given")
    compared = 0
    for run in cycle.runs:
        for step, loss in enumerate(run.losses, run.launch.first_step + 1):
            if step > len(expected):
                break
            if loss.learning_rate is None:
                return not_compared(f"the {run.launch.name} run logs no rate in step {step}")
            compared += 1
            due = expected[step - 1]
            if not abs(loss.learning_rate - due) <= _LOGGED_RATE * abs(due):
                reason = (
                    f"the learning rate of step {step} of the {run.launch.name} run is"
                    f" {loss.learning_rate:g}, expected {due:g} (the schedule must advance once per"
                    " step, not per micro-batch, and must be restored at a resume)"
                )
                location = Location(phase="optimizer", step=step)
                return failed(compared, reason, "optimizer-update", location)
    return passed(compared)


def judge_checkpoints(cycle: Cycle) -> LevelResult:
    """Judge that all expected checkpoints exist, whole, finite and distinct, and no others."""
    if not cycle.saved:
        return not_run("the uninterrupted run did not end well")
    library, saved = cycle.library, cycle.saved
    compared = sum(len(one.hashes) for one in saved.values())
    if missing := [step for step in library.kept_steps if step not in saved]:
        reason = (
            f"the checkpoint of step {missing[0]} is absent: expected {_steps(library.kept_steps)}, found"
            f" {_steps(saved)}"
        )
        return failed_checkpoint(missing[0], compared, reason)
    for one in saved.values():
        if one.problem is not None or not one.hashes:
            reason = one.problem or "it holds no tensor"
            return failed_checkpoint(
                one.step, compared, f"the checkpoint of step {one.step}: {reason}"
            )
        if one.not_finite:
            names = name_some(one.not_finite)
            reason = f"the checkpoint of step {one.step} is not finite: {names}"
            return failed_checkpoint(
                one.step, compared, reason, diagnosis="non-finite", parameter=one.not_finite[0]
            )
        if emptied := _emptied(one, cycle):
            reason = f"the checkpoint of step {one.step} holds only zeros in {name_some(emptied)}"
            return failed_checkpoint(one.step, compared, reason, parameter=emptied[0])
    return _judge_history(cycle, compared)


def _emptied(saved: SavedModel, cycle: Cycle) -> list[str]:
    """Return the tensors of a checkpoint that are all zero and were not at the start."""
    start = cycle.start
    return [] if start is None else [name for name in saved.zero if name not in start.zero]


def _judge_history(cycle: Cycle, compared: int) -> LevelResult:
    """Judge that checkpoints differ, that no surplus ones remain, and that the model is unchanged."""
    library, saved = cycle.library, cycle.saved
    for earlier, later in pairwise(saved.values()):
        if earlier.hashes == later.hashes:
            reason = (
                f"the checkpoint of step {later.step} repeats the tensors of step {earlier.step}"
            )
            return failed_checkpoint(later.step, compared, reason)
    if too_many := [step for step in saved if step not in library.kept_steps]:
        reason = f"there is an unexpected checkpoint of step {too_many[0]}"
        if set(too_many) <= set(library.saved_steps):
            reason = (
                f"{len(saved)} checkpoints are kept instead of {len(library.kept_steps)}: step"
                f" {too_many[0]} still has one"
            )
        return failed_checkpoint(too_many[0], compared, reason)
    if cycle.changed_files:
        names = name_some(cycle.changed_files)
        return failed_checkpoint(0, compared, f"files in the folder of {{model}} changed: {names}")
    return passed(compared, steps=list(saved))


def judge_updates(cycle: Cycle) -> LevelResult:
    """Judge that trainable parameters changed and frozen ones did not."""
    last = cycle.last
    if last is None or not last.hashes:
        return not_run("the last checkpoint is absent or incomplete", unchecked=True)
    if (reason := _find_nothing_learned(cycle)) is not None:
        location = Location(phase="backward", step=cycle.library.steps)
        return failed(len(last.hashes), reason, "frozen-parameters", location)
    if cycle.library.checkpoints.kind == "adapter":
        return _judge_adapter(cycle)
    named = {
        pattern: {name for name in last.hashes if fnmatchcase(name, pattern)}
        for pattern in cycle.library.frozen
    }
    if unused := [pattern for pattern, names in named.items() if not names]:
        return failed(0, f"`frozen`: no parameter is called {unused[0]!r}", "frozen-parameters")
    return _judge_movement(cycle, last, set().union(*named.values()))


def _find_nothing_learned(cycle: Cycle) -> str | None:
    """Describe losses or weights of a run that learns nothing, or None.

    Most losses are equal in all logged digits, or weights only shrink.
    """
    losses = cycle.uninterrupted.values
    value, count = Counter(losses).most_common(1)[0] if losses else (0.0, 0)
    is_exact = value == 0 or unit_in_log(value, losses) <= _PRECISE * abs(value)
    if is_exact and 2 * count > len(losses) > 1:
        return (
            f"the loss of {count} of {len(losses)} steps is {value:g} in all logged digits: it does"
            " not depend on the model and the batch. Does any label remain in them?"
        )
    shrunk = [step for step, one in cycle.saved.items() if one.only_shrunk]
    if not shrunk:
        return None
    before = max((step for step in cycle.saved if step < shrunk[0]), default=0)
    return (
        f"from step {before} to step {shrunk[0]}, no element of any tensor grew: weight decay alone"
        " moves them, and all gradients are zero"
    )


def _judge_movement(cycle: Cycle, last: SavedModel, frozen: set[str]) -> LevelResult:
    compared = len(last.hashes)
    start = cycle.start.hashes if cycle.start is not None else {}
    if last.hashes.keys() != start.keys():
        names = name_some(sorted(last.hashes.keys() ^ start.keys()))
        reason = f"parameters differ from the model's: {names}"
        return failed(compared, reason, "weight-mismatch")
    moved = differing_keys(last.hashes, start)
    still = sorted(last.hashes.keys() - frozen - moved)
    if still:
        reason = f"{len(still)} of {compared - len(frozen)} trainable tensors never moved"
        return failed_update(compared, reason, still, "frozen-parameters", step=last.step)
    if wrong := sorted(frozen & moved):
        reason = f"{len(wrong)} of {len(frozen)} frozen tensors moved"
        return failed_update(compared, reason, wrong, "optimizer-update", step=last.step)
    return passed(compared, frozen=len(frozen))


def _judge_adapter(cycle: Cycle) -> LevelResult:
    first, last = min(cycle.saved.items())[1], cycle.saved[cycle.library.steps]
    compared = len(last.hashes)
    if empty := [name for name in last.zero if _STARTS_AT_ZERO in name]:
        reason = f"{len(empty)} of {compared} tensors of the adapter are still zero"
        return failed_update(compared, reason, empty, "adapter-mismatch", step=last.step)
    still = sorted(name for name in last.hashes if last.hashes[name] == first.hashes.get(name))
    if still:
        reason = f"{len(still)} of {compared} tensors of the adapter never moved"
        return failed_update(compared, reason, still, "frozen-parameters", step=last.step)
    return passed(compared)


def _steps(steps: Iterable[int]) -> str:
    return f"steps {', '.join(map(str, steps))}"


def judge_leftovers(cycle: Cycle) -> LevelResult:
    """Judge that no run left anything on the machine."""
    runs = [run for run in cycle.runs if run.hung_in is None]
    for run in runs:
        if run.leftovers:
            things = "; ".join(map(str, run.leftovers))
            return failed(len(runs), f"the {run.launch.name} run left behind {things}")
    return passed(len(runs)) if runs else not_run("the run was ended while it hung")


def judge_memory(cycle: Cycle) -> LevelResult:
    """Judge that device memory was released. Host memory is only recorded."""
    runs = cycle.runs
    for run in runs:
        if run.on_device is not None and not run.on_device.is_back(_DEVICE_SLACK_BYTES):
            reason = f"device memory of the {run.launch.name} run: {run.on_device}"
            return failed(len(runs), reason)
    host_peak = _peak(run.host for run in runs)
    on_device = [run.on_device for run in runs if run.on_device is not None]
    if not on_device:
        return not_run("no device memory was used", host_peak_bytes=host_peak)
    return passed(len(on_device), host_peak_bytes=host_peak, device_peak_bytes=_peak(on_device))


def _peak(uses: Iterable[MemoryUse]) -> int:
    return max((use.peak_bytes - use.start_bytes for use in uses), default=0)


def notes_on_runs(cycle: Cycle, found: Mapping[str, LevelResult]) -> list[str]:
    """Collect notes on memory, nondeterminism and unchecked levels."""
    most = max(cycle.runs, key=lambda run: run.host.peak_bytes)
    notes = [f"host memory of the {most.launch.name} run: {most.host}"]
    device = [run for run in cycle.runs if run.on_device is not None]
    notes += [f"device memory of the {run.launch.name} run: {run.on_device}" for run in device[:1]]
    if any(one.repeated_differs for one in cycle.resumptions.values()):
        notes.append(
            "two uninterrupted runs of one seed differ: their difference limits that of resumed runs"
        )
    unchecked = [
        f"{name}: {one.level.reason}"
        for name, one in found.items()
        if (one.level.model_extra or {}).get("unchecked")
    ]
    return unchecked + notes


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
