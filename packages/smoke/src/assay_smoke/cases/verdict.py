"""Judges the answers of a case's worlds, level by level."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

from assay.errors import name_some
from assay.judge.levels import (
    LevelResult,
    failed,
    level_of,
    not_compared,
    not_run,
    notes_of,
    passed,
    rows_of,
)
from assay.judge.limits import Limits
from assay.judge.replays import Judged, describe_stages_level
from assay.noise import TENSOR_FLOOR
from assay.statistics import Statistic
from assay.training.judging.diagnosis import diagnose_free_run
from assay.training.judging.evidence import FreeEvidence
from assay.training.judging.free_run import (
    judge_checkpoint,
    judge_losses,
    judge_replicas,
    judge_trajectory,
    notes_on_rounding,
    rows_of_free_run,
    trajectory_gap,
)
from assay.training.reports import FreeRun, StepRecord, TrainOptions
from assay.verdicts import Diagnosis, Location, Measurement, Ratio, Verdict
from assay_smoke.cases.worlds import ReadAnswer, ReferenceAnswer, TerminateAnswer, TrainAnswer
from assay_smoke.judging import differing_keys, failed_checkpoint, failed_update, verdict_of
from assay_smoke.machine import Leftover
from assay_smoke.matrix.cases import Case


@dataclass(kw_only=True)
class CaseEvidence:
    """The answers of every world by rank, empty for a world that did not run, and their reference."""

    case: Case
    options: TrainOptions
    reference: ReferenceAnswer
    limits: Limits
    trained: list[TrainAnswer] = field(default_factory=list)
    terminated: list[TerminateAnswer] = field(default_factory=list)
    resumed: list[FreeRun] = field(default_factory=list)
    restarted: list[StepRecord] = field(default_factory=list)
    read: ReadAnswer | None = None
    left_behind: list[Leftover] = field(default_factory=list)

    @cached_property
    def free(self) -> FreeEvidence:
        """Return the free run with its resumption in the same process."""
        return FreeEvidence(
            self.options,
            self.case.precision,
            self.reference.training,
            [answer.report for answer in self.trained],
            self.limits,
        )

    @cached_property
    def in_new_processes(self) -> FreeEvidence:
        """Return the free run with the resumption in new processes instead."""
        reports = [
            replace(rank.report, free=_resumed_otherwise(rank.report.free, resumed))
            for rank, resumed in zip(self.trained, self.resumed, strict=True)
        ]
        return replace(self.free, reports=reports)


def held_at_end(run: FreeRun) -> dict[str, str]:
    """Return the hash of every part of a parameter or moment that a rank holds after its last step."""
    return {str(part): digest for step in run.held[-1:] for part, digest in step}


def _resumed_otherwise(free: FreeRun, resumed: FreeRun) -> FreeRun:
    """Return `free` with the resumption of `resumed`, without findings on its own resumption."""
    differ = differing_keys(held_at_end(free), held_at_end(resumed))
    return replace(
        free,
        resumed=resumed.resumed,
        resumed_trajectory=resumed.resumed_trajectory,
        ended_otherwise=sorted(differ) if resumed.held else [],  # otherwise it ended too early
        problem=resumed.problem,
        not_restored=[],
        saved=[],
        changed_by_saving=[],
        settings=[],
    )


# Merging in float64 changes weights and logits by rounding alone. A merge in float32 would leave 1e-8.
_EXACT_IN_FLOAT64 = 1e-10

# Final logits follow from the final parameters, so they share this limit.
_STATISTIC: Final = "trajectory-error"

_RANKS_DRAW = "each rank draws its own dropout masks"

# Share of a rank's parameters that may outlive a tear-down. Cached tensors, such as masks, are smaller.
_KEPT = 0.5


def judge_case(evidence: CaseEvidence) -> tuple[Verdict, list[Measurement]]:
    """Judge all levels. The first level with a diagnosis provides that of the verdict."""
    found = {name: judge(evidence) for name, judge in _LEVELS.items()}
    causes = [one.cause for one in found.values() if one.cause and one.cause.diagnosis]
    verdict = verdict_of(
        found,
        next(iter(causes), None),
        model=evidence.reference.training.model,
        reference=evidence.reference.training.reference,
        candidate=evidence.free.report.run | {"case": evidence.case.id},
        notes=dict.fromkeys(notes_of(found)),
    )
    return verdict, rows_of(found)


def _judge_movement(evidence: CaseEvidence) -> LevelResult:
    """Compare hashes of every parameter and buffer before the first and after the last step."""
    before, after = (
        {name.removeprefix("model."): digest for rank in ranks for name, digest in rank.items()}
        for ranks in zip(*((rank.before, rank.after) for rank in evidence.trained), strict=True)
    )
    moved = differing_keys(before, after)
    trainable = {row.parameter for row in evidence.reference.training.noise_trajectory}
    for names in evidence.reference.training.shared:
        trainable |= set(names) if trainable & set(names) else set()
    expected = trainable & set(evidence.reference.moved) & before.keys()
    still, unexpected = sorted(expected - moved), sorted(moved - trainable)
    if still:
        reason = f"{len(still)} of {len(expected)} trained parameters never moved"
        module = still[0].rpartition(".")[0]
        return failed_update(len(before), reason, still, "frozen-parameters", module=module)
    if unexpected:
        reason = f"{len(unexpected)} frozen parameters or buffers moved"
        module = unexpected[0].rpartition(".")[0]
        return failed_update(len(before), reason, unexpected, "optimizer-update", module=module)
    if not expected:
        return not_compared("the noise run changes no parameter of this run")
    return passed(len(before))


def _judge_losses(evidence: CaseEvidence) -> LevelResult:
    curves = rows_of_free_run(evidence.free)
    for rank, answer in enumerate(evidence.trained):
        for step in [*answer.report.free.steps, *answer.report.free.resumed]:
            if not math.isfinite(step.loss):
                reason = f"loss {step.loss} in step {step.step}"
                location = Location(phase="forward", step=step.step, rank=rank)
                return failed(1, reason, "non-finite", location).with_rows(curves)
    judged, notes = judge_losses(evidence.free)
    if judged is None:
        return not_compared(notes[0]).with_rows(curves, notes)
    return _by_ratios("loss", evidence, [judged], notes).with_rows(curves)


def _judge_updates(evidence: CaseEvidence) -> LevelResult:
    if gap := trajectory_gap(evidence.free):
        return not_compared(gap)
    judged = [item for item in judge_trajectory(evidence.free) if "resumed" not in item.port.port]
    if not judged:
        return not_compared(_RANKS_DRAW)
    return _by_ratios("updates", evidence, judged, notes_on_rounding(evidence.free))


def _judge_resume(evidence: CaseEvidence) -> LevelResult:
    """Compare the run that resumed in new processes with the uninterrupted one."""
    if not evidence.resumed:
        return _failed_checkpoint(evidence, "no checkpoint was left to resume from")
    free = evidence.in_new_processes
    result = judge_checkpoint(free)
    apart = [item for item in judge_trajectory(free) if item.failed]
    if apart and result.cause is None:
        return _by_ratios("resume", evidence, apart, result.notes)
    rows = [row.model_copy(update={"level": "resume"}) for row in result.measurements]
    # The level `checkpoint` has counted the comparisons of the checkpoint itself.
    compared = len({(row.step, row.port) for row in rows}) + len(held_at_end(evidence.resumed[0]))
    level = result.level.model_copy(update={"compared": compared})
    return LevelResult(level, rows, result.notes, cause=result.cause)


def _judge_termination(evidence: CaseEvidence) -> LevelResult:
    if evidence.case.interruption != "sigterm":
        return not_run("the case does not send SIGTERM")
    resume_at = evidence.options.resume_at
    for rank, one in enumerate(evidence.terminated):
        problem = None
        if not one.was_signalled:
            problem = f"SIGTERM in the middle of a step did not reach rank {rank}"
        elif [step.step for step in one.steps] != list(range(resume_at)):
            problem = f"rank {rank} did not finish the step in which SIGTERM reached it"
        if problem is not None:
            return failed(1, problem)
    if not evidence.resumed:
        return _failed_checkpoint(evidence, "no checkpoint was written after SIGTERM")
    return passed(len(evidence.terminated))


def _judge_tear_down(evidence: CaseEvidence) -> LevelResult:
    for rank, answer in enumerate(evidence.trained):
        kept = answer.survivors
        if kept.num_bytes > _KEPT * answer.parameter_bytes:
            reason = (
                f"{kept.num_bytes:,} bytes of tensors outlive two tear-downs; the rank has"
                f" {answer.parameter_bytes:,} bytes of parameters: {', '.join(kept.shapes)}"
            )
            return failed(1, f"rank {rank}: {reason}")
    return passed(
        len(evidence.trained),
        kept_bytes=max(answer.survivors.num_bytes for answer in evidence.trained),
        parameter_bytes=min(answer.parameter_bytes for answer in evidence.trained),
    )


def _judge_leftovers(evidence: CaseEvidence) -> LevelResult:
    if evidence.left_behind:
        return failed(1, name_some([str(one) for one in evidence.left_behind]))
    return passed(1)


def _by_ratios(
    name: str, evidence: CaseEvidence, judged: list[Judged], notes: list[str]
) -> LevelResult:
    over = [item for item in judged if item.failed]
    level = level_of(len(judged), len(over), describe_stages_level(judged))
    rows = [item.measurement(name, f"{item.port.module}:{item.port.port}") for item in judged]
    fault = diagnose_free_run(evidence.free, over) if over else None
    return LevelResult(level, rows, notes, judged, cause=fault)


def _by_ratio(evidence: CaseEvidence, statistic: Statistic, error: float, noise: float) -> Ratio:
    """Judge one error by the limit of its statistic. noise: at least the floor of a tensor counts."""
    floor = TENSOR_FLOOR * evidence.free.unit_roundoff
    return Ratio(statistic, error, max(noise, floor)).judged(evidence.limits.of(statistic))


def _judge_reading(evidence: CaseEvidence) -> LevelResult:
    """Judge the logits of the last checkpoint's model, loaded as users load it."""
    answer = evidence.read
    if answer is None:
        return _failed_checkpoint(evidence, "there is no last checkpoint")
    if answer.problem is not None or answer.logits_error is None:
        return _failed_checkpoint(evidence, f"the model cannot be loaded: {answer.problem}")
    if wrong := _adapter_problem(answer):
        return _failed_checkpoint(evidence, wrong, 1)
    noise = evidence.reference.logits_noise
    judged = _by_ratio(evidence, _STATISTIC, answer.logits_error, noise)
    if evidence.reference.training.draws and evidence.free.on_ranks:
        return not_compared(_RANKS_DRAW)
    rows = [judged.measurement("users", "logits")]
    if judged.failed:
        reason = (
            f"the saved model computes different logits: relative error {answer.logits_error:.2e},"
            f" {judged.value:.3g}x the noise run's (limit {judged.limit:.3g}x)"
        )
        return _failed_checkpoint(evidence, reason, 1, rows)
    return passed(1, noise_ratio=judged.value, limit=judged.limit).with_rows(rows)


def _judge_restart(evidence: CaseEvidence) -> LevelResult:
    """Compare the first loss of a run from the saved model with the next loss of the saving run."""
    if evidence.case.checkpoint != "hugging-face":
        return not_run("only a Hugging Face checkpoint is restarted from")
    if not evidence.restarted:
        return _failed_checkpoint(evidence, "there is no checkpoint to start another run from")
    expected = evidence.free.report.free.steps[evidence.options.resume_at].loss
    error = abs(evidence.restarted[0].loss - expected) / abs(expected)
    judged = _by_ratio(evidence, "loss-error", error, 0.0)
    rows = [judged.measurement("restart", "loss")]
    if not judged.failed:
        return passed(1, noise_ratio=judged.value).with_rows(rows)
    reason = (
        f"a run from the saved model begins with the loss {evidence.restarted[0].loss}; the run that saved"
        f" it continued with {expected}"
    )
    return _failed_checkpoint(evidence, reason, 1, rows)


def _adapter_problem(answer: ReadAnswer) -> str | None:
    if answer.adapter_effect is None:
        return None
    if not answer.adapter_effect > 0:
        return "the saved adapter changes nothing: its tensors are empty or zero"
    for how, error in answer.merged_errors.items():
        if not error <= _EXACT_IN_FLOAT64:
            return f"the adapter {how} changes the logits: relative error {error}"
    return None


def _failed_checkpoint(
    evidence: CaseEvidence, reason: str, compared: int = 0, rows: Iterable[Measurement] = ()
) -> LevelResult:
    """Return a failed level for a checkpoint."""
    options = evidence.options
    diagnosis: Diagnosis = "adapter-mismatch" if options.lora else "checkpoint-mismatch"
    return failed_checkpoint(options.steps, compared, reason, diagnosis=diagnosis).with_rows(rows)


# The levels in the order of the verdict.
_LEVELS: dict[str, Callable[[CaseEvidence], LevelResult]] = {
    "trained": _judge_movement,
    "loss": _judge_losses,
    "updates": _judge_updates,
    "replicas": lambda evidence: judge_replicas(evidence.free),
    "checkpoint": lambda evidence: judge_checkpoint(evidence.free),
    "sigterm": _judge_termination,
    "resume": _judge_resume,
    "restart": _judge_restart,
    "users": _judge_reading,
    "tear-down": _judge_tear_down,
    "left behind": _judge_leftovers,
}
