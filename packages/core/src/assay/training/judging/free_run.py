"""Judges the free run: its losses, where it ends, and its checkpoint."""

import math
from collections.abc import Iterator

from assay.comparing.judge import Judged
from assay.comparing.levels import DiagnosedFault, LevelResult
from assay.comparing.results import PortResult
from assay.dtypes import float_format
from assay.errors import name_some
from assay.noise import TENSOR_FLOOR
from assay.stages import Stage
from assay.statistics import worst_error
from assay.training.judging.evidence import FreeEvidence
from assay.training.judging.places import location_of_parameter
from assay.training.processes.trainer_report import FreeRun
from assay.training.state.records import StateValue
from assay.verdicts import Diagnosis, Level, Location, Measurement, Outcome, Ratio

# In 16 bits the noise of a few losses is never small by chance, as it is at least half a unit: a fourth
# of the limit, 5, is over twice the largest ratio of 484 clean runs, 1.91 (training.toml). Of 474 in
# float32 three are over 5, and one is at 12.2.
_OF_NARROW = 0.25

# Ports of the parameters at the end of the free run and of the resumed run.
TRAJECTORY, RESUMED_TRAJECTORY = "trajectory", "resumed-trajectory"

# The sum of two parts is the same in both orders. With more ranks, DistributedDataParallel changes the
# order of summation after its first step, and so does a resumed run.
_MOST_IN_ANY_ORDER = 2


def judge_losses(evidence: FreeEvidence) -> tuple[Judged | None, list[str]]:
    """Judge the losses of the free run against the yardstick's, and return notes on them.

    The allowed error is that of the noise run's losses times the weight drift. Errors are root mean
    squares over the steps, because there are only a few losses.
    """
    expected = evidence.reference.yardstick_losses
    actual = [step.loss for step in evidence.report.free.steps]
    noise = evidence.reference.noise_losses
    if _draws_on_ranks(evidence):
        note = (
            "losses of the free run are not compared: each rank draws the numbers of its own"
            " dropout; those of single micro-batches are"
        )
        return None, [note]
    if not all(map(math.isfinite, noise)):
        return None, [f"losses are not compared: the noise run itself has {noise}"]
    error = relative_error_of_losses(actual, expected)
    floor = TENSOR_FLOOR * evidence.unit_roundoff
    allowed = max(relative_error_of_losses(noise, expected), floor) * _weight_drift(evidence)
    ratio = Ratio("loss-error", error, allowed)
    port = PortResult("", "free-run", Stage("", "forward"), 0, evidence.dtype, "")
    delta = worst_error(abs(a - e) for a, e in zip(actual, expected, strict=True))
    noise_delta = worst_error(abs(a - e) for a, e in zip(noise, expected, strict=True))
    note = (
        f"largest difference of a loss over {len(actual)} free steps: {delta:.1e} nats"
        f" (noise run: {noise_delta:.1e})"
    )
    notes = [note, *_report_differences(evidence)]
    limit = evidence.limits.of("loss-error")
    if float_format(evidence.dtype).is_narrow:
        limit *= _OF_NARROW
    return Judged.of(ratio, limit, port), notes


def _report_differences(evidence: FreeEvidence) -> list[str]:
    """Note differences in the trainer's reports that do not affect training."""
    notes = []
    counted = [step.num_tokens for step in evidence.report.free.steps]
    expected = evidence.reference.num_tokens
    if counted != expected:
        notes.append(
            f"the trainer counts {counted} label tokens in its steps, the reference {expected}"
        )
    still = sorted(
        {step.step for one in evidence.reports for step in one.free.steps if not step.updated}
    )
    if still:
        notes.append(
            f"steps of the free run that changed no parameter: {', '.join(map(str, still))}, as one"
            " that is skipped for its loss scale does; of their updates nothing was compared there"
        )
    losses = [[step.loss for step in report.free.steps] for report in evidence.reports]
    others = [rank for rank, own in enumerate(losses) if not all(map(_same, own, losses[0]))]
    if others:
        notes.append(
            f"rank {others[0]} reports the losses {losses[others[0]]}, rank 0 {losses[0]}: those of"
            " rank 0 are judged"
        )
    return notes


def judge_trajectory(evidence: FreeEvidence) -> list[Judged]:
    """Judge where the free run and the resumed run take each parameter, against the recorded steps.

    This covers what no replayed step shows: the last update, and effects that build up over steps.
    """
    if _draws_on_ranks(evidence):
        return []
    noise = {row.parameter: row for row in evidence.reference.noise_trajectory}
    limit, options = evidence.limits.of("trajectory-error"), evidence.options
    # Adam moves an element by the learning rate, which bounds the drift by the declared rounding.
    drift = evidence.report.traits.update_rounding * options.learning_rate * options.steps
    judged = []
    for rank, report in enumerate(evidence.reports):
        runs = {
            TRAJECTORY: report.free.trajectory,
            RESUMED_TRAJECTORY: report.free.resumed_trajectory,
        }
        for name, row in ((name, row) for name, rows in runs.items() for row in rows):
            module, _, short = row.parameter.rpartition(".")
            floor = TENSOR_FLOOR * evidence.unit_roundoff * row.size
            expected = max(noise[row.parameter].error, floor)
            if not math.isfinite(expected):
                continue
            stage = Stage(module, "optimizer")
            port = PortResult(module, f"{name}.{short}", stage, 0, evidence.dtype, "")
            port.rank = rank
            # Adds to the allowed error without being multiplied by the limit: its bound is known.
            expected += drift / limit
            judged.append(Judged.of(Ratio("trajectory-error", row.error, expected), limit, port))
    return judged


def _draws_on_ranks(evidence: FreeEvidence) -> bool:
    return evidence.reference.draws and evidence.on_ranks


def _weight_drift(evidence: FreeEvidence) -> float:
    """Return the error of the final weights relative to the noise run's, at least 1.

    To first order the error of a loss is proportional to it. Adam moves a weight by the learning rate
    even if its gradient is mostly rounding, so the drift differs between correct runs. Return 1 if
    the weights are over their limit.
    """
    judged = judge_trajectory(evidence)
    if any(item.failed for item in judged):
        return 1.0
    return max((1.0, *(item.value for item in judged)))


def notes_on_rounding(evidence: FreeEvidence) -> list[str]:
    """Note the declared rounding of the optimizer, below which errors of updates are not seen."""
    rounding = evidence.report.traits.update_rounding
    if not rounding:
        return []
    told = (
        f"the trainer declares that its optimizer rounds whole updates by {rounding:.1e}, relative:"
    )
    return [f"{told} smaller errors of updates and moments are not seen"]


def trajectory_gap(evidence: FreeEvidence) -> str | None:
    """Explain why the end of some parameter cannot be judged; None if all can."""
    if _draws_on_ranks(evidence):
        return None
    expected = {row.parameter: row.error for row in evidence.reference.noise_trajectory}
    if broken := sorted(name for name, error in expected.items() if not math.isfinite(error)):
        return f"the noise run itself does not end at a finite {name_some(broken)}"
    shown = {row.parameter for report in evidence.reports for row in report.free.trajectory}
    if missing := sorted(expected.keys() - shown):
        return f"not seen after the last step: {name_some(missing)}"
    return None


def relative_error_of_losses(actual: list[float], expected: list[float]) -> float:
    """Return the root mean square of the relative errors of the losses."""
    squares = [((a - e) / e) ** 2 for a, e in zip(actual, expected, strict=True)]
    return math.sqrt(sum(squares) / len(squares))


def judge_checkpoint(evidence: FreeEvidence) -> tuple[LevelResult, DiagnosedFault | None]:
    """Judge bitwise the saved files, the restored state, and the resumed run."""
    free = evidence.report.free
    inexact = _why_inexact(evidence)
    rows = [
        row
        for rank, report in enumerate(evidence.reports)
        for row in _resumed_rows(evidence, rank, report.free)
    ]
    if inexact is not None:
        # Values differ from the first reduction or update on, which comes after the first loss.
        first = (evidence.options.resume_at, "loss")
        rows = [row for row in rows if (row.step, row.port) == first]
    problems = list(_find_problems(evidence, rows, is_exact=inexact is None))
    compared = free.saved_compared + free.compared + len({(row.step, row.port) for row in rows})
    if problems:
        outcome, reason = Outcome.FAIL, problems[0].reason
    elif not compared or not rows:
        outcome, reason = Outcome.NOT_COMPARED, "the run was not resumed"
    elif not free.saved_compared:
        outcome, reason = Outcome.NOT_COMPARED, "the checkpoint has no model that users could load"
    else:
        outcome, reason = Outcome.PASS, None
    level = Level(verdict=outcome, compared=compared, reason=reason)
    notes = [*free.notes, *(problem.reason for problem in problems[1:] if problem.reason)]
    if inexact is not None:
        by = "not compared" if evidence.reference.draws else "judged by its noise"
        notes.append(
            f"{inexact}: of the resumed run the first loss is compared bitwise, what follows is {by}"
        )
    fault = problems[0] if problems else None
    return LevelResult(level, rows, notes, cause=fault), fault


def _find_problems(
    evidence: FreeEvidence, rows: list[Measurement], *, is_exact: bool
) -> Iterator[DiagnosedFault]:
    free = evidence.report.free
    if free.problem is not None:
        yield _mismatch(evidence, free.problem)
    yield from _wrong_state(evidence, free.changed_by_saving, "after saving")
    if free.saved:
        reason = (
            f"{len(free.saved)} of {free.saved_compared} tensors in the model folder are not what"
            f" the model held: {name_some(free.saved)}"
        )
        yield _mismatch(evidence, reason, free.saved[0])
    if free.settings:
        reason = "the model folder's configuration is not the model's"
        yield _mismatch(evidence, f"{reason}: {name_some(free.settings)}")
    yield from _wrong_state(evidence, free.not_restored, "after loading the checkpoint")
    yield from _wrong_state(evidence, evidence.report.replay.not_loaded, "after load_state_dict")
    yield from _different_step(evidence, rows)
    if free.ended_otherwise and is_exact:
        reason = (
            f"after the last step {len(free.ended_otherwise)} parameters and moments of the resumed"
            f" run are not the uninterrupted run's: {name_some(free.ended_otherwise)}"
        )
        yield _mismatch(evidence, reason)


def _why_inexact(evidence: FreeEvidence) -> str | None:
    """Explain why a resumed run may differ in its last bits; None if it must be bitwise equal."""
    declared = evidence.report.traits.inexact_resume
    if declared is None and len(evidence.reports) > _MOST_IN_ANY_ORDER:
        return f"{len(evidence.reports)} ranks may add up in another order after a restart"
    return declared


def _location(evidence: FreeEvidence, name: str | None = None) -> Location:
    return location_of_parameter("checkpoint", name, evidence.options.resume_at)


def _mismatch(evidence: FreeEvidence, reason: str, name: str | None = None) -> DiagnosedFault:
    diagnosis: Diagnosis = "adapter-mismatch" if evidence.options.lora else "checkpoint-mismatch"
    return DiagnosedFault(diagnosis, _location(evidence, name), reason)


def _wrong_state(
    evidence: FreeEvidence, wrong: list[StateValue], when: str
) -> list[DiagnosedFault]:
    if not wrong:
        return []
    names = name_some([value.path for value in wrong])
    reason = f"{len(wrong)} values are not as they were {when}: {names}"
    if all(value.part == "generators" for value in wrong):
        return [DiagnosedFault("rng-state", _location(evidence), reason)]
    named = [value.parameter for value in wrong if value.parameter is not None]
    # With LoRA only the adapter changes from checkpoint to checkpoint.
    adapted = evidence.options.lora and named
    diagnosis: Diagnosis = "adapter-mismatch" if adapted else "checkpoint-mismatch"
    name = named[0] if named else None
    return [DiagnosedFault(diagnosis, _location(evidence, name), reason)]


def _different_step(evidence: FreeEvidence, rows: list[Measurement]) -> list[DiagnosedFault]:
    wrong = [row for row in rows if row.ratio > 0]
    if not wrong:
        return []
    first = wrong[0]
    reason = f"the {first.port} of step {first.step} is not the uninterrupted run's"
    free = evidence.report.free
    # With equal state and batch, the first loss differs only through random numbers or through values
    # outside of the state, such as the scale of an adapter.
    at_once = first.port == "loss" and first.step == evidence.options.resume_at
    drawn = at_once and not free.not_restored and not free.generators_compared
    location = Location(phase="checkpoint", step=first.step, rank=first.rank)
    finding = _mismatch(evidence, reason)
    diagnosis: Diagnosis = "rng-state" if drawn else finding.diagnosis
    return [DiagnosedFault(diagnosis, location, reason)]


def _resumed_rows(evidence: FreeEvidence, rank: int, free: FreeRun) -> list[Measurement]:
    """Compare a rank's report of each resumed step with the same step of the uninterrupted run."""
    rows: list[Measurement] = []
    if not free.resumed:
        return rows
    expected = free.steps[evidence.options.resume_at :]
    for one, other in zip(free.resumed, expected, strict=True):
        pairs = {"loss": (one.loss, other.loss), "gradient norm": (one.grad_norm, other.grad_norm)}
        rows += [
            Measurement(
                level="checkpoint",
                module="",
                port=port,
                phase="checkpoint",
                rank=rank,
                step=other.step,
                statistic="exact",
                actual=abs(actual - wanted),
                expected=0.0,
                ratio=0.0 if _same(actual, wanted) else math.inf,
                limit=0.0,
            )
            for port, (actual, wanted) in pairs.items()
        ]
    return rows


def _same(actual: float, expected: float) -> bool:
    return actual == expected or (math.isnan(actual) and math.isnan(expected))
