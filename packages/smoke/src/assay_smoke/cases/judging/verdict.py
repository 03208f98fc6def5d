"""The verdict on a case."""

import math
from collections.abc import Mapping, Sequence

from assay.comparing.judge import Judged, describe_stages_level
from assay.comparing.levels import DiagnosedFault, LevelResult, outcome_of_levels
from assay.errors import name_some
from assay.training.judging.diagnosis import diagnose_free_run
from assay.training.judging.free_run import (
    judge_checkpoint,
    judge_losses,
    judge_trajectory,
    notes_on_rounding,
    trajectory_gap,
)
from assay.training.judging.replicas import judge_replicas
from assay.training.processes.requests import StepRecord
from assay.verdicts import Diagnosis, Level, Location, Measurement, Outcome, Verdict
from assay_smoke import COMPARED_UNIT
from assay_smoke.cases.judging.evidence import CaseEvidence
from assay_smoke.cases.judging.saved_models import (
    RANKS_DRAW,
    failed_checkpoint,
    judge_reading,
    judge_restart,
)
from assay_smoke.matrix.cases import Case

Found = tuple[LevelResult, DiagnosedFault | None]

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
        "restart": judge_restart(evidence),
        "users": judge_reading(evidence),
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
                return _non_finite(step, rank)
    judged, notes = judge_losses(evidence.free)
    if judged is None:
        level = Level(verdict=Outcome.NOT_COMPARED, reason=notes[0])
        return LevelResult(level, notes=notes), None
    return _by_ratios("loss", evidence, [judged], notes)


def _non_finite(step: StepRecord, rank: int) -> Found:
    reason = f"loss {step.loss} in step {step.step}"
    location = Location(phase="forward", step=step.step, rank=rank)
    return _failed(1, reason, DiagnosedFault("non-finite", location, reason))


def _judge_updates(evidence: CaseEvidence) -> Found:
    if gap := trajectory_gap(evidence.free):
        return LevelResult(Level(verdict=Outcome.NOT_COMPARED, reason=gap)), None
    judged = [item for item in judge_trajectory(evidence.free) if "resumed" not in item.port.port]
    if not judged:
        return LevelResult(Level(verdict=Outcome.NOT_COMPARED, reason=RANKS_DRAW)), None
    return _by_ratios("updates", evidence, judged, notes_on_rounding(evidence.free))


def _judge_resume(evidence: CaseEvidence) -> Found:
    """Compare the run that resumed in new processes with the uninterrupted one."""
    if not evidence.resumed:
        return failed_checkpoint(evidence, "no checkpoint was left to resume from")
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
        return failed_checkpoint(evidence, "no checkpoint was written after SIGTERM")
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
