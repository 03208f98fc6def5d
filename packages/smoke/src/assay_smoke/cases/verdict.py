"""Judges the answers of a case's worlds, level by level."""

import math
from collections.abc import Mapping, Sequence
from typing import Final

from assay.comparing.judge import Judged, describe_stages_level
from assay.comparing.levels import (
    DiagnosedFault,
    JudgedRatio,
    LevelResult,
    level_of,
    outcome_of_levels,
)
from assay.errors import name_some
from assay.noise import TENSOR_FLOOR, Ratio
from assay.training.judging.diagnosis import diagnose_free_run
from assay.training.judging.free_run import (
    judge_checkpoint,
    judge_losses,
    judge_trajectory,
    notes_on_rounding,
    trajectory_gap,
)
from assay.training.judging.replicas import judge_replicas
from assay.verdicts import Diagnosis, Level, Location, Measurement, Outcome, Verdict
from assay_smoke import COMPARED_UNIT
from assay_smoke.cases.evidence import CaseEvidence
from assay_smoke.cases.requests import ReadAnswer
from assay_smoke.matrix.cases import Case

Found = tuple[LevelResult, DiagnosedFault | None]

# Merging in float64 changes weights and logits by rounding alone. A merge in float32 would leave 1e-8.
_EXACT_IN_FLOAT64 = 1e-10

# Final logits follow from the final parameters, so they share this limit.
_STATISTIC: Final = "trajectory-error"

_RANKS_DRAW = "each rank draws its own dropout masks"

# Share of a rank's parameters that may outlive a tear-down. Cached tensors, such as masks, are smaller.
_KEPT = 0.5


def judge_case(case: Case, evidence: CaseEvidence) -> tuple[Verdict, list[Measurement]]:
    """Judge all levels. The first level that fails provides the diagnosis."""
    found: dict[str, Found] = {
        "trained": _judge_movement(evidence),
        "loss": _judge_losses(evidence),
        "updates": _judge_updates(evidence),
        "replicas": judge_replicas(evidence.free),
        "checkpoint": judge_checkpoint(evidence.free),
        "sigterm": _judge_termination(case, evidence),
        "resume": _judge_resume(evidence),
        "restart": _judge_restart(evidence),
        "users": _judge_reading(evidence),
        "tear-down": _judge_tear_down(evidence),
        "left behind": _judge_leftovers(evidence),
    }
    levels = {name: result.level for name, (result, _) in found.items()}
    outcome = outcome_of_levels(levels)
    first = next((finding for _, finding in found.values() if finding is not None), None)
    report = evidence.free.report
    verdict = Verdict(
        verdict=outcome,
        model=evidence.reference.training.model,
        reference=evidence.reference.training.reference,
        candidate=report.run | {"case": case.id},
        levels=levels,
        location=first.location if first else None,
        diagnosis=first.diagnosis if first else None,
        notes=list(dict.fromkeys(n for result, _ in found.values() for n in result.notes)),
        compared=sum(level.compared for level in levels.values()),
        compared_unit=COMPARED_UNIT,
    )
    return verdict, [row for result, _ in found.values() for row in result.measurements]


def verdict_of_early_end(
    case: Case, outcome: Outcome, reason: str, reference: Mapping[str, str] | None = None
) -> Verdict:
    """Return the verdict on a case whose reference or ranks ended before their end."""
    return Verdict(
        verdict=outcome,
        model={"name": f"micro:{case.family}"},
        reference=dict(reference or {}),
        candidate={"case": case.id},
        levels={"run": Level(verdict=outcome, reason=reason)},
        compared_unit=COMPARED_UNIT,
    )


def _judge_movement(evidence: CaseEvidence) -> Found:
    """Compare hashes of every parameter and buffer before the first and after the last step."""
    before: dict[str, str] = {}
    after: dict[str, str] = {}
    for rank in evidence.trained:
        before |= {name.removeprefix("model."): digest for name, digest in rank.before.items()}
        after |= {name.removeprefix("model."): digest for name, digest in rank.after.items()}
    moved = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    trainable = {row.parameter for row in evidence.reference.training.noise_trajectory}
    for names in evidence.reference.training.shared:
        trainable |= set(names) if trainable & set(names) else set()
    expected = trainable & set(evidence.reference.moved) & before.keys()
    still, unexpected = sorted(expected - moved), sorted(moved - trainable)
    if still:
        shown = name_some(still)
        reason = f"{len(still)} of {len(expected)} trained parameters never moved: {shown}"
        return _failed_update(len(before), "frozen-parameters", still, reason)
    if unexpected:
        reason = f"{len(unexpected)} frozen parameters or buffers moved: {name_some(unexpected)}"
        return _failed_update(len(before), "optimizer-update", unexpected, reason)
    if not expected:
        reason = "the noise run changes no parameter of this run"
        return LevelResult(Level(verdict=Outcome.NOT_COMPARED, reason=reason)), None
    return LevelResult(Level(verdict=Outcome.PASS, compared=len(before))), None


def _failed(compared: int, reason: str, finding: DiagnosedFault | None = None) -> Found:
    return LevelResult(Level(verdict=Outcome.FAIL, reason=reason, compared=compared)), finding


def _failed_update(compared: int, diagnosis: Diagnosis, names: Sequence[str], reason: str) -> Found:
    module = names[0].rpartition(".")[0]
    location = Location(phase="optimizer", module=module, parameter=names[0])
    return _failed(compared, reason, DiagnosedFault(diagnosis, location, reason))


def _judge_losses(evidence: CaseEvidence) -> Found:
    for rank, answer in enumerate(evidence.trained):
        for step in [*answer.report.free.steps, *answer.report.free.resumed]:
            if not math.isfinite(step.loss):
                reason = f"loss {step.loss} in step {step.step}"
                location = Location(phase="forward", step=step.step, rank=rank)
                return _failed(1, reason, DiagnosedFault("non-finite", location, reason))
    judged, notes = judge_losses(evidence.free)
    if judged is None:
        level = Level(verdict=Outcome.NOT_COMPARED, reason=notes[0])
        return LevelResult(level, notes=notes), None
    return _by_ratios("loss", evidence, [judged], notes)


def _judge_updates(evidence: CaseEvidence) -> Found:
    if gap := trajectory_gap(evidence.free):
        return LevelResult(Level(verdict=Outcome.NOT_COMPARED, reason=gap)), None
    judged = [item for item in judge_trajectory(evidence.free) if "resumed" not in item.port.port]
    if not judged:
        return LevelResult(Level(verdict=Outcome.NOT_COMPARED, reason=_RANKS_DRAW)), None
    return _by_ratios("updates", evidence, judged, notes_on_rounding(evidence.free))


def _judge_resume(evidence: CaseEvidence) -> Found:
    """Compare the run that resumed in new processes with the uninterrupted one."""
    if not evidence.resumed:
        return _failed_checkpoint(evidence, "no checkpoint was left to resume from")
    free = evidence.in_new_processes
    result, finding = judge_checkpoint(free)
    failed = [item for item in judge_trajectory(free) if item.failed]
    if failed and finding is None:
        return _by_ratios("resume", evidence, failed, result.notes)
    rows = [row.model_copy(update={"level": "resume"}) for row in result.measurements]
    # The level `checkpoint` has counted the comparisons of the checkpoint itself.
    compared = len({(row.step, row.port) for row in rows}) + len(evidence.resumed[0].held)
    level = result.level.model_copy(update={"compared": compared})
    return LevelResult(level, rows, result.notes), finding


def _judge_termination(case: Case, evidence: CaseEvidence) -> Found:
    if case.interruption != "sigterm":
        return LevelResult.not_run("the case does not send SIGTERM"), None
    resume_at = evidence.request.candidate.options.resume_at
    for rank, one in enumerate(evidence.terminated):
        problem = None
        if not one.was_signalled:
            problem = f"SIGTERM in the middle of a step did not reach rank {rank}"
        elif [step.step for step in one.steps] != list(range(resume_at)):
            problem = f"rank {rank} did not finish the step in which SIGTERM reached it"
        if problem is not None:
            return _failed(1, problem)
    if not evidence.resumed:
        return _failed_checkpoint(evidence, "no checkpoint was written after SIGTERM")
    return LevelResult(Level(verdict=Outcome.PASS, compared=len(evidence.terminated))), None


def _judge_tear_down(evidence: CaseEvidence) -> Found:
    for rank, answer in enumerate(evidence.trained):
        kept = answer.survivors
        if kept.num_bytes > _KEPT * answer.parameter_bytes:
            reason = (
                f"{kept.num_bytes:,} bytes of tensors outlive two tear-downs; the rank has"
                f" {answer.parameter_bytes:,} bytes of parameters: {', '.join(kept.shapes)}"
            )
            return _failed(1, f"rank {rank}: {reason}")
    level = Level(
        verdict=Outcome.PASS,
        compared=len(evidence.trained),
        kept_bytes=max(answer.survivors.num_bytes for answer in evidence.trained),
        parameter_bytes=min(answer.parameter_bytes for answer in evidence.trained),
    )
    return LevelResult(level), None


def _judge_leftovers(evidence: CaseEvidence) -> Found:
    if evidence.left_behind:
        return _failed(1, name_some([str(one) for one in evidence.left_behind]))
    return LevelResult(Level(verdict=Outcome.PASS, compared=1)), None


def _by_ratios(name: str, evidence: CaseEvidence, judged: list[Judged], notes: list[str]) -> Found:
    facts = describe_stages_level(judged)
    failed = [item for item in judged if item.failed]
    outcome = Outcome.FAIL if failed else Outcome.PASS
    level = Level(verdict=outcome, compared=len(judged), **facts)
    rows = [item.measurement(name, f"{item.port.module}:{item.port.port}") for item in judged]
    finding = diagnose_free_run(evidence.free, failed) if failed else None
    return LevelResult(level, rows, notes, judged), finding


def _judge_reading(evidence: CaseEvidence) -> Found:
    """Judge the logits of the last checkpoint's model, loaded as users load it."""
    answer = evidence.read
    if answer is None:
        return _failed_checkpoint(evidence, "there is no last checkpoint")
    if answer.problem is not None or answer.logits_error is None:
        return _failed_checkpoint(evidence, f"the model cannot be loaded: {answer.problem}")
    if wrong := _adapter_problem(answer):
        return _failed_checkpoint(evidence, wrong, 1)
    floor = TENSOR_FLOOR * evidence.free.unit_roundoff
    ratio = Ratio(_STATISTIC, answer.logits_error, max(evidence.reference.logits_noise, floor))
    judged = JudgedRatio(ratio, evidence.limits.of(_STATISTIC))
    if evidence.reference.training.draws and evidence.free.on_ranks:
        return LevelResult(Level(verdict=Outcome.NOT_COMPARED, reason=_RANKS_DRAW)), None
    rows = [judged.measurement("users", "logits")]
    if judged.failed:
        reason = (
            f"the saved model computes different logits: relative error {answer.logits_error:.2e},"
            f" {ratio.value:.3g}x the noise run's (limit {judged.limit:.3g}x)"
        )
        return _failed_checkpoint(evidence, reason, 1, rows)
    level = level_of(1, 0, {"noise_ratio": ratio.value, "limit": judged.limit})
    return LevelResult(level, rows), None


def _judge_restart(evidence: CaseEvidence) -> Found:
    """Compare the first loss of a run from the saved model with the next loss of the saving run."""
    if evidence.request.kind != "hugging-face":
        return LevelResult.not_run("only a Hugging Face checkpoint is restarted from"), None
    if not evidence.restarted:
        return _failed_checkpoint(evidence, "there is no checkpoint to start another run from")
    resume_at = evidence.request.candidate.options.resume_at
    expected = evidence.free.report.free.steps[resume_at].loss
    error = abs(evidence.restarted[0].loss - expected) / abs(expected)
    floor = TENSOR_FLOOR * evidence.free.unit_roundoff
    judged = JudgedRatio(Ratio("loss-error", error, floor), evidence.limits.of("loss-error"))
    rows = [judged.measurement("restart", "loss")]
    if not judged.failed:
        return LevelResult(level_of(1, 0, {"noise_ratio": judged.ratio.value}), rows), None
    reason = (
        f"a run from the saved model begins with the loss {evidence.restarted[0].loss}; the run that"
        f" saved it continued with {expected}"
    )
    return _failed_checkpoint(evidence, reason, 1, rows)


def _adapter_problem(answer: ReadAnswer) -> str | None:
    if answer.adapter_effect is None:
        return None
    if not answer.adapter_effect > 0:
        return "the saved adapter changes nothing: its tensors are empty or zero"
    if answer.merged_error is None:
        return None
    errors = {
        "merged into the weights": answer.merged_error,
        "merged and unmerged": answer.unmerged_error,
        "merged, saved and loaded": answer.exported_error,
    }
    for how, error in errors.items():
        if error is None or not error <= _EXACT_IN_FLOAT64:
            return f"the adapter {how} changes the logits: relative error {error}"
    return None


def _failed_checkpoint(
    evidence: CaseEvidence, reason: str, compared: int = 0, rows: Sequence[Measurement] = ()
) -> tuple[LevelResult, DiagnosedFault]:
    """Return a failed level for a checkpoint."""
    options = evidence.request.candidate.options
    location = Location(phase="checkpoint", step=options.steps)
    level = Level(verdict=Outcome.FAIL, reason=reason, compared=compared)
    diagnosis = "adapter-mismatch" if options.lora else "checkpoint-mismatch"
    return LevelResult(level, list(rows)), DiagnosedFault(diagnosis, location, reason)  # type: ignore[arg-type]
