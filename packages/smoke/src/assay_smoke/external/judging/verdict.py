"""The verdict on a training library."""

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from assay.comparing.levels import outcome_of_levels
from assay.verdicts import Level, Location, Measurement, Outcome, Verdict
from assay_smoke import COMPARED_UNIT
from assay_smoke.external.evidence import Evidence
from assay_smoke.external.judging.equivalent_run import judge_equivalent, measure_equivalent
from assay_smoke.external.judging.judged_levels import JudgedLevel
from assay_smoke.external.judging.resumptions import (
    judge_interruption,
    judge_resumption,
    measure_resumption,
)
from assay_smoke.external.judging.saved_models import judge_checkpoints, judge_updates
from assay_smoke.machine.failures import FULL_DISK
from assay_smoke.machine.process_tree import MemoryUse

# Half a unit of the fourth significant digit. Libraries, such as transformers, log at least four.
_LOGGED_RATE = 5e-4

# Memory that a driver may keep after the processes have ended.
_DEVICE_SLACK_BYTES = 64 << 20


def judge(evidence: Evidence, toml: Path) -> tuple[Verdict, list[Measurement]]:
    """Judge all levels. The first level that fails provides the cause."""
    judges: dict[str, Callable[[Evidence], JudgedLevel]] = {
        "run": _judge_runs,
        "loss": _judge_losses,
        "learning-rate": _judge_learning_rates,
        "checkpoint": judge_checkpoints,
        "updates": judge_updates,
        "equivalent": judge_equivalent,
        "resume": judge_resumption,
        "sigterm": judge_interruption,
        "leftovers": _judge_leftovers,
        "memory": _judge_memory,
    }
    judged = {name: judge_level(evidence) for name, judge_level in judges.items()}
    levels = {name: one.level for name, one in judged.items()}
    cause = next((one for one in judged.values() if one.level.verdict is Outcome.FAIL), None)
    library = evidence.library
    measurements = measure_resumption(evidence) + measure_equivalent(evidence)
    ratios = [row for row in measurements if row.statistic != "exact"]
    worst = max(ratios, key=lambda row: row.ratio / (row.limit or 1.0), default=None)
    verdict = Verdict(
        verdict=outcome_of_levels(levels),
        model={"name": library.model},
        reference={"run": "the uninterrupted run"},
        candidate={
            "run": library.device,
            "trainer": f"command:{toml}",
            "name": library.name,
            "launch": library.launch,
        },
        levels=levels,
        location=cause.location if cause else None,
        diagnosis=cause.diagnosis if cause else None,
        notes=_notes(evidence, levels),
        statistic=worst.statistic if worst else "exact",
        noise_ratio=worst.ratio if worst else None,
        limit=worst.limit if worst else 0.0,
        resolution=None if worst else 0.0,
        compared=sum(level.compared for level in levels.values()),
        compared_unit=COMPARED_UNIT,
    )
    return verdict, measurements


def _judge_runs(evidence: Evidence) -> JudgedLevel:
    """Judge that runs from the start ended in time with exit code 0."""
    from_start = [run for run in (evidence.uninterrupted, evidence.repeated) if run is not None]
    for run in from_start:
        reason = run.describe_bad_end()
        if reason is not None:
            at = Location(phase="checkpoint", step=run.steps_made)
            return JudgedLevel.failed(
                len(from_start), reason, location=at if reason.startswith(FULL_DISK) else None
            )
    return JudgedLevel.passed(
        len(from_start), seconds={run.launch.name: run.seconds for run in evidence.runs}
    )


def _judge_losses(evidence: Evidence) -> JudgedLevel:
    """Judge that losses are finite, in order, and one per step."""
    compared = sum(len(run.losses) for run in evidence.runs)
    for run in evidence.runs:
        name, first = run.launch.name, run.launch.first_step
        for number, loss in enumerate(run.losses, first + 1):
            if not math.isfinite(loss.value):
                reason = f"the loss of step {number} of the {name} run is {loss.value}"
                return JudgedLevel.failed(
                    compared, reason, "non-finite", Location(phase="forward", step=number)
                )
        logged = [loss.step for loss in run.losses if loss.step is not None]
        expected = [first + _first_number(evidence) + index for index in range(len(run.losses))]
        if logged and logged != expected:
            wrong = next(
                (pair for pair in zip(logged, expected, strict=False) if pair[0] != pair[1]),
                (None, None),
            )
            reason = f"the {name} run logs step {wrong[0]} where {wrong[1]} is expected"
            return JudgedLevel.failed(compared, reason)
        is_whole = run is not evidence.interrupted and not run.exit_code and run.hung_in is None
        num_expected = evidence.library.steps - first
        if is_whole and len(run.losses) != num_expected:
            reason = f"the {name} run logs {len(run.losses)} losses for {num_expected} steps"
            return JudgedLevel.failed(compared, reason)
    return JudgedLevel.passed(compared) if compared else JudgedLevel.not_run("no run logged a loss")


def _judge_learning_rates(evidence: Evidence) -> JudgedLevel:
    """Judge that every step has the learning rate of the declared schedule."""
    expected = evidence.library.learning_rates
    if expected is None:
        return JudgedLevel.not_run("no `learning_rates` are given")
    compared = 0
    for run in evidence.runs:
        for step, loss in enumerate(run.losses, run.launch.first_step + 1):
            if step > len(expected):
                break
            if loss.learning_rate is None:
                return JudgedLevel.not_compared(
                    f"the {run.launch.name} run logs no rate in step {step}"
                )
            compared += 1
            due = expected[step - 1]
            if not abs(loss.learning_rate - due) <= _LOGGED_RATE * abs(due):
                reason = (
                    f"the learning rate of step {step} of the {run.launch.name} run is"
                    f" {loss.learning_rate:g}, expected {due:g} (the schedule must advance once per"
                    " step, not per micro-batch, and must be restored at a resume)"
                )
                location = Location(phase="optimizer", step=step)
                return JudgedLevel.failed(compared, reason, "optimizer-update", location)
    return JudgedLevel.passed(compared)


def _first_number(evidence: Evidence) -> int:
    """Return the number that the library gives its first step: 0 or 1."""
    first = next((loss.step for loss in evidence.uninterrupted.losses), None)
    return 0 if first == 0 else 1


def _judge_leftovers(evidence: Evidence) -> JudgedLevel:
    """Judge that no run left anything on the machine."""
    runs = [run for run in evidence.runs if run.hung_in is None]
    for run in runs:
        if run.leftovers:
            things = "; ".join(map(str, run.leftovers))
            return JudgedLevel.failed(len(runs), f"the {run.launch.name} run left behind {things}")
    return (
        JudgedLevel.passed(len(runs))
        if runs
        else JudgedLevel.not_run("the run was ended while it hung")
    )


def _judge_memory(evidence: Evidence) -> JudgedLevel:
    """Judge that device memory was released. Host memory is only recorded."""
    runs = evidence.runs
    for run in runs:
        if run.on_device is not None and not run.on_device.is_back(_DEVICE_SLACK_BYTES):
            reason = f"device memory of the {run.launch.name} run: {run.on_device}"
            return JudgedLevel.failed(len(runs), reason)
    host_peak = _peak(run.host for run in runs)
    on_device = [run.on_device for run in runs if run.on_device is not None]
    if not on_device:
        return JudgedLevel.not_run("no device memory was used", host_peak_bytes=host_peak)
    return JudgedLevel.passed(
        len(on_device), host_peak_bytes=host_peak, device_peak_bytes=_peak(on_device)
    )


def _peak(uses: Iterable[MemoryUse]) -> int:
    return max((use.peak_bytes - use.start_bytes for use in uses), default=0)


def _notes(evidence: Evidence, levels: Mapping[str, Level]) -> list[str]:
    """Collect notes on memory, nondeterminism and unchecked levels."""
    most = max(evidence.runs, key=lambda run: run.host.peak_bytes)
    notes = [f"host memory of the {most.launch.name} run: {most.host}"]
    device = [run for run in evidence.runs if run.on_device is not None]
    notes += [f"device memory of the {run.launch.name} run: {run.on_device}" for run in device[:1]]
    resumptions = [one for one in (evidence.resumption, evidence.after_sigterm) if one is not None]
    if any(one.repeated_differs for one in resumptions):
        notes.append(
            "two uninterrupted runs of one seed differ: their difference limits that of resumed runs"
        )
    unchecked = [
        name for name, level in levels.items() if (level.model_extra or {}).get("unchecked")
    ]
    return [f"{name}: {levels[name].reason}" for name in unchecked] + notes
