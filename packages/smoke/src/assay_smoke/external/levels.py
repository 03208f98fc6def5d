"""Runs a training library uninterrupted, resumed and interrupted, and judges it level by level."""

import fnmatch
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

from assay.devices.registry import open_device
from assay.errors import name_some
from assay.judge.levels import (
    EXACT_NUMBERS,
    LevelResult,
    failed,
    not_compared,
    not_run,
    passed,
    rows_of,
)
from assay.models.sources import local_folder, resolve_model
from assay.runs import Progress
from assay.runs.results import write_results
from assay.verdicts import Location, Measurement, Outcome, Verdict
from assay_smoke.external.library import ExternalLibrary
from assay_smoke.external.rerun_levels import (
    judge_equivalent,
    judge_interruption,
    judge_resumption,
    unit_in_log,
)
from assay_smoke.external.runs import (
    Cycle,
    SavedModel,
    checkpoints_of,
    read_history,
    rows_of_logs,
)
from assay_smoke.external.watched_run import Launch, require_runnable
from assay_smoke.judging import differing_keys, failed_checkpoint, failed_update, verdict_of
from assay_smoke.machine import FULL_DISK, MemoryUse, format_size

# Half a unit of the fourth significant digit. Libraries, such as transformers, log at least four.
_LOGGED_RATE = 5e-4

# Memory that a driver may keep after the processes have ended.
_DEVICE_SLACK_BYTES = 64 << 20

# Less than a driver's context with its kernels takes. Other processes of the machine may change by less.
_LEAST_DEVICE_BYTES = 16 << 20

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
        for actual, due in zip_longest(logged, expected) if logged else ():
            if actual != due:
                reason = f"the {name} run logs step {actual} where {due} is expected"
                return failed(compared, reason)
        is_whole = run.launch.sigterm_after is None and run.ended_well
        num_expected = cycle.library.steps - first
        if is_whole and len(run.losses) != num_expected:
            reason = f"the {name} run logs {len(run.losses)} losses for {num_expected} steps"
            return failed(compared, reason)
    return passed(compared) if compared else not_run("no run logged a loss")


def judge_learning_rates(cycle: Cycle) -> LevelResult:
    """Judge that every step has the rate of the declared schedule, or that of the uninterrupted run."""
    declared = cycle.library.learning_rates
    logged = [loss.learning_rate for loss in cycle.uninterrupted.losses]
    expected: list[float | None] = logged if declared is None else [*declared]
    compared = 0
    for run in cycle.runs if declared else cycle.runs[1:]:
        steps = range(run.launch.first_step, len(expected))
        for at, loss in zip(steps, run.losses, strict=False):
            step, due, rate = at + 1, expected[at], loss.learning_rate
            if declared and rate is None:
                return not_compared(f"the {run.launch.name} run logs no rate in step {step}")
            if due is None or rate is None:
                continue
            compared += 1
            if not abs(rate - due) <= _LOGGED_RATE * abs(due):
                reason = (
                    f"the learning rate of step {step} of the {run.launch.name} run is {rate:g},"
                    f" {'expected' if declared else 'in the uninterrupted run'} {due:g}"
                )
                if run.launch.first_step:
                    reason += " (a resume must restore the schedule, and the optimizer, which holds the rate)"
                    return failed_checkpoint(
                        step, compared, reason, diagnosis="checkpoint-mismatch"
                    )
                reason += " (the schedule must advance once per step, not per micro-batch)"
                location = Location(phase="optimizer", step=step)
                return failed(compared, reason, "optimizer-update", location)
    if not compared:
        return not_run("no two runs log a learning rate, and no `learning_rates` are given")
    return passed(compared)


def judge_checkpoints(cycle: Cycle) -> LevelResult:
    """Judge that all expected checkpoints exist, whole, finite and distinct, and no others."""
    if not cycle.saved:
        return not_run("the uninterrupted run did not end well")
    compared = sum(len(one.hashes) for one in cycle.saved.values())
    for step, reason, facts in _find_wrong_checkpoints(cycle):
        return failed_checkpoint(step, compared, reason, **facts)
    return passed(compared, steps=list(cycle.saved))


def _find_wrong_checkpoints(cycle: Cycle) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield step, reason and cause of each wrong checkpoint. Step 0 stands for the model itself."""
    library, saved = cycle.library, cycle.saved
    if missing := [step for step in library.kept_steps if step not in saved]:
        found = f"expected {_steps(library.kept_steps)}, found {_steps(saved)}"
        yield missing[0], f"the checkpoint of step {missing[0]} is absent: {found}", {}
    for one in saved.values():
        name = f"the checkpoint of step {one.step}"
        if one.problem is not None or not one.hashes:
            yield one.step, f"{name}: {one.problem or 'it holds no tensor'}", {}
        if one.not_finite:
            cause = {"diagnosis": "non-finite", "parameter": one.not_finite[0]}
            yield one.step, f"{name} is not finite: {name_some(one.not_finite)}", cause
        start = cycle.start
        if emptied := [name for name in one.zero if start is not None and name not in start.zero]:
            reason = f"{name} holds only zeros in {name_some(emptied)}"
            cause = {"diagnosis": "checkpoint-mismatch", "parameter": emptied[0]}
            yield one.step, reason, cause
    yield from _find_surplus(cycle)


def _find_surplus(cycle: Cycle) -> Iterator[tuple[int, str, dict[str, Any]]]:
    library, saved = cycle.library, cycle.saved
    for earlier, later in pairwise(saved.values()):
        if earlier.hashes == later.hashes:
            reason = (
                f"the checkpoint of step {later.step} repeats the tensors of step {earlier.step}"
            )
            yield later.step, reason, {}
    if too_many := [step for step in saved if step not in library.kept_steps]:
        reason = f"there is an unexpected checkpoint of step {too_many[0]}"
        if set(too_many) <= set(library.saved_steps):
            kept = f"{len(saved)} checkpoints are kept instead of {len(library.kept_steps)}"
            reason = f"{kept}: step {too_many[0]} still has one"
        yield too_many[0], reason, {}
    if cycle.changed_files:
        yield 0, f"files in the folder of {{model}} changed: {name_some(cycle.changed_files)}", {}


def judge_updates(cycle: Cycle) -> LevelResult:
    """Judge that trainable parameters changed and frozen ones did not."""
    last = cycle.last
    if last is None or not last.hashes:
        return not_run("the last checkpoint is absent or incomplete", unchecked=True)
    if (reason := _find_nothing_learned(cycle)) is not None:
        location = Location(phase="backward", step=cycle.library.steps)
        return failed(len(last.hashes), reason, "frozen-parameters", location)
    if cycle.library.checkpoints.kind == "adapter":
        return _judge_adapter(cycle, last)
    frozen: set[str] = set()
    for pattern in cycle.library.frozen:
        named = fnmatch.filter(last.hashes, pattern)
        if not named:
            return failed(0, f"`frozen`: no parameter is called {pattern!r}", "frozen-parameters")
        frozen |= {*named}
    start = cycle.start.hashes if cycle.start is not None else {}
    if other := sorted(last.hashes.keys() ^ start.keys()):
        reason = f"parameters differ from the model's: {name_some(other)}"
        return failed(len(last.hashes), reason, "weight-mismatch")
    found = _judge_movement(last, start, frozen, "tensors outside of `frozen`")
    return found or passed(len(last.hashes), frozen=len(frozen))


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


def _judge_movement(
    last: SavedModel, start: Mapping[str, str], frozen: set[str], what: str
) -> LevelResult | None:
    """Fail if one of the tensors `what` is as at the start, or a frozen one is not."""
    compared, moved = len(last.hashes), differing_keys(last.hashes, start)
    if still := sorted(last.hashes.keys() - frozen - moved):
        reason = f"{len(still)} of {compared - len(frozen)} {what} never moved"
        return failed_update(compared, reason, still, "frozen-parameters", step=last.step)
    if wrong := sorted(frozen & moved):
        reason = f"{len(wrong)} of {len(frozen)} frozen tensors moved"
        return failed_update(compared, reason, wrong, "optimizer-update", step=last.step)
    return None


def _judge_adapter(cycle: Cycle, last: SavedModel) -> LevelResult:
    compared = len(last.hashes)
    if empty := [name for name in last.zero if _STARTS_AT_ZERO in name]:
        total = sum(_STARTS_AT_ZERO in name for name in last.hashes)
        reason = (
            f"{len(empty)} of {total} {_STARTS_AT_ZERO} are zero, as before training, so the adapter"
            " changes nothing there"
        )
        return failed_update(compared, reason, empty, "adapter-mismatch", step=last.step)
    first = min(cycle.saved.items())[1]
    found = _judge_movement(last, first.hashes, set(), "tensors of the adapter")
    return found or passed(compared)


def judge_first_save(cycle: Cycle) -> LevelResult:
    """Judge that a checkpoint holds the step after which it is saved, not the one before.

    A resumed run does not show an old model if its state has weights of its own. So a short run saves
    after each of two steps: if models are one step old, its first checkpoint holds the initial one.
    """
    library, line = cycle.library, " ".join(cycle.library.launch)
    unchecked = "it was not checked whether saved models are one step old"
    if "{steps}" not in line or "{save_every}" not in line:
        why = "the launch line has no {steps} and {save_every} for a run that saves after each step"
        return not_run(f"{why}: {unchecked}", unchecked=True)
    short = library.model_copy(update={"steps": 2, "save_every": 1, "keep": None})
    run = cycle.run("first-save", library=short)
    found = checkpoints_of(run.launch)
    if not run.ended_well or not {1, 2} <= found.keys():
        problem = run.describe_bad_end() or "it wrote no checkpoints of steps 1 and 2"
        reason = f"the run of two steps: {problem}; {unchecked}"
        return not_run(reason, unchecked=True) if run.ended_well else not_compared(reason)
    logged = [loss.learning_rate for loss in run.losses]
    first, second = [-1.0 if rate is None else rate for rate in (*logged, None, None)][:2]
    step = 2 if first == 0 else 1  # a warmup may begin at zero
    (saved,) = read_history(run.launch, {step: found[step]})
    if not _is_initial(saved, cycle):
        return passed(len(saved.hashes))
    held = f"the checkpoint of step {step} holds the initial model"
    if library.precision == "float16":
        return not_run(f"{held}, as a loss scale may skip steps: {unchecked}", unchecked=True)
    # Some libraries log the rate of the next step, so that a rising one may have been zero.
    is_positive = first == 0 < second or first > second > 0
    advice = []
    if not is_positive:
        advice.append(
            "log the learning rate"
            if first < 0
            else "a rate that does not fall, or falls to 0, may be that of the next step; launch it"
            " without warm-up and with a falling rate"
        )
    if library.precision is None:
        advice.append("write `precision`")
    if advice:
        why = "that step changed nothing, as with a rate of 0 or if a loss scale skips it"
        return not_compared(
            f"{held}: saved models are one step old, or {why}; {', and '.join(advice)}"
        )
    reason = f"{held}, although its learning rate is {second if step == 2 else first:g}: saved models are one step old"
    return failed_checkpoint(step, len(saved.hashes), reason)


def _is_initial(saved: SavedModel, cycle: Cycle) -> bool:
    """Return True if a checkpoint holds what training began with."""
    if cycle.start is not None:
        return bool(saved.hashes) and saved.hashes == cycle.start.hashes
    begin = {name for name in saved.hashes if _STARTS_AT_ZERO in name}
    return bool(begin) and begin <= set(saved.zero)


def _steps(steps: Iterable[int]) -> str:
    return f"steps {', '.join(map(str, steps))}"


def judge_leftovers(cycle: Cycle) -> LevelResult:
    """Judge that no run left anything on the machine."""
    runs = [run for run in cycle.runs if run.hung_in is None]
    for run in runs:
        if run.leftovers:
            things = "; ".join(map(str, run.leftovers))
            if any(one.kind == "temporary file" for one in run.leftovers):
                things += "; `leftovers_allowed` names files that may stay"
            return failed(len(runs), f"the {run.launch.name} run left behind {things}")
    return passed(len(runs)) if runs else not_run("the run was ended while it hung")


def judge_memory(cycle: Cycle) -> LevelResult:
    """Judge that the runs used memory of the device, and released it. Host memory is only recorded."""
    runs, device = cycle.runs, cycle.launch.device
    name = cycle.library.device
    for run in runs:
        if run.on_device is not None and not run.on_device.is_back(_DEVICE_SLACK_BYTES):
            reason = f"device memory of the {run.launch.name} run: {run.on_device}"
            return failed(len(runs), reason)
    host_peak = _peak(run.host for run in runs)
    on_device = [run.on_device for run in runs if run.on_device is not None]
    if not on_device:
        if device is None or device.name == "cpu":
            return not_run("the library trains on the host", host_peak_bytes=host_peak)
        if device.torch_device == "cpu":
            return not_compared(f"{name} exists only inside assay: a command does not train on it")
        return not_run(
            f"the driver reports no free memory: it was not checked whether the library trains on {name}",
            unchecked=True,
            host_peak_bytes=host_peak,
        )
    device_peak = _peak(on_device)
    if device_peak < _LEAST_DEVICE_BYTES:
        used = format_size(device_peak)
        return failed(len(runs), f"the runs used {used} of {name}: the library trains elsewhere")
    return passed(len(on_device), host_peak_bytes=host_peak, device_peak_bytes=device_peak)


def _peak(uses: Iterable[MemoryUse]) -> int:
    return max((use.peak_bytes - use.start_bytes for use in uses), default=0)


def notes_on_runs(cycle: Cycle, found: Mapping[str, LevelResult]) -> list[str]:
    """Collect notes on memory, nondeterminism and unchecked levels."""
    most = max(cycle.runs, key=lambda run: run.host.peak_bytes)
    notes = [f"host memory of the {most.launch.name} run: {most.host}"]
    device = [run for run in cycle.runs if run.on_device is not None]
    notes += [f"device memory of the {run.launch.name} run: {run.on_device}" for run in device[:1]]
    if any(cycle.spreads.values()):
        notes.append(
            "two uninterrupted runs of one seed differ: their difference limits that of resumed runs"
        )
    unchecked = [
        f"{name}: {one.level.reason}"
        for name, one in found.items()
        if (one.level.model_extra or {}).get("unchecked")
    ]
    return [*unchecked, *notes, describe_unjudged([cycle.library])]


def describe_unjudged(libraries: Iterable[ExternalLibrary]) -> str:
    """Name what all runs of a command share, which comparing them cannot judge."""
    is_declared = all(library.learning_rates for library in libraries)
    schedule = "" if is_declared else "the schedule (without `learning_rates`), "
    return (
        "not judged: what all runs of the command share, such as the model's code, the loss, masked"
        f" labels, {schedule}clipping and the update rule; `assay smoke data` and `assay check train` judge these"
    )


# The levels in the order of the verdict. The first that fails provides the cause.
_LEVELS: dict[str, Callable[[Cycle], LevelResult]] = {
    "run": judge_runs,
    "loss": judge_losses,
    "learning-rate": judge_learning_rates,
    "checkpoint": judge_checkpoints,
    "updates": judge_updates,
    "first-save": judge_first_save,
    "equivalent": judge_equivalent,
    "resume": judge_resumption,
    "sigterm": judge_interruption,
    "leftovers": judge_leftovers,
    "memory": judge_memory,
}
_QUESTIONS = {
    "run": "Do all runs end, with the files that they promise?",
    "loss": "Are all steps logged, with finite losses?",
    "learning-rate": "Does a resumed run continue the schedule?",
    "checkpoint": "Does each checkpoint hold the model of its step?",
    "updates": "Does every parameter that is trained change?",
    "first-save": "Does a saved model include the last step before it?",
    "equivalent": "Does another division of the same rows train the same?",
    "resume": "Does a resumed run continue as the uninterrupted one?",
    "sigterm": "Does a terminated run leave a checkpoint that can be resumed?",
    "leftovers": "Does nothing of a run remain on the machine?",
    "memory": "Is the device's memory used, and released?",
}
# The levels that make runs, in the order of the runs. The others judge all runs, so they come later.
_MAKE_RUNS = ("resume", "sigterm", "equivalent")
# It makes a run that only matters if no other level fails, except that an old model can fail a resumed run.
_LAST, _EXPLAINED = "first-save", "resume"


def run_external(
    toml: Path, folder: Path, progress: Progress, device_name: str | None = None
) -> Verdict:
    """Run the library that `toml` describes, and judge it.

    device_name: to train on, if not the file's.
    folder: an existing one. It gets a log and the output of every run, and verdict.json. After a
        PASS, the outputs with their checkpoints are removed.
    Raises: UsageError or MachineError, with nothing left running, for a file that does not describe
        a library, and for a library that contradicts its file.
    """
    library = require_runnable(toml, device_name)
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
    order = (*_MAKE_RUNS, *(name for name in _LEVELS if name not in (*_MAKE_RUNS, _LAST)))
    results = {name: _LEVELS[name](cycle) for name in order}
    failed = {name for name, one in results.items() if one.level.verdict is Outcome.FAIL}
    decided = failed - {_EXPLAINED}
    results[_LAST] = not_run("another level failed") if decided else _LEVELS[_LAST](cycle)
    found = {name: results[name] for name in _LEVELS}
    for name, one in found.items():
        one.level = one.level.model_copy(update={"question": _QUESTIONS[name]})
    first = next((one for one in found.values() if one.level.verdict is Outcome.FAIL), None)
    measurements = rows_of(found)
    # The numbers of a failure are those of its level; a rule without a ratio has none.
    ratios = [
        row
        for row in (measurements if first is None else first.measurements)
        if row.statistic != "exact" and (first is None or row.ratio > (row.limit or 1.0))
    ]
    numbers, worst = (
        EXACT_NUMBERS,
        max(ratios, key=lambda one: one.ratio / (one.limit or 1.0), default=None),
    )
    if worst is not None:
        numbers = {"statistic": worst.statistic, "noise_ratio": worst.ratio, "limit": worst.limit}
    library = cycle.library
    verdict = verdict_of(
        found,
        first.cause if first is not None else None,
        model={"name": library.model},
        reference={"run": "the uninterrupted run"},
        candidate={
            "run": library.device,
            "trainer": f"command:{toml}",
            "case": library.name,
            "launch": library.launch,
        },
        notes=notes_on_runs(cycle, found),
        **numbers,
    )
    return verdict, [*measurements, *rows_of_logs(cycle)]
