"""Judges saved models: the one that users load, and a run that restarts from it."""

from collections.abc import Sequence
from typing import Final

from assay.comparing.levels import DiagnosedFault, JudgedRatio, LevelResult, level_of
from assay.noise import TENSOR_FLOOR, Ratio
from assay.verdicts import Level, Location, Measurement, Outcome
from assay_smoke.cases.judging.evidence import CaseEvidence
from assay_smoke.cases.requests import ReadAnswer

# Merging in float64 changes weights and logits by rounding alone. A merge in float32 would leave 1e-8.
EXACT_IN_FLOAT64 = 1e-10

# Final logits follow from the final parameters, so they share this limit.
_STATISTIC: Final = "trajectory-error"

RANKS_DRAW = "each rank draws its own dropout masks"


def judge_reading(evidence: CaseEvidence) -> tuple[LevelResult, DiagnosedFault | None]:
    """Judge the logits of the last checkpoint's model, loaded as users load it."""
    answer = evidence.read
    if answer is None:
        return failed_checkpoint(evidence, "there is no last checkpoint")
    if answer.problem is not None or answer.logits_error is None:
        return failed_checkpoint(evidence, f"the model cannot be loaded: {answer.problem}")
    if wrong := _adapter_problem(answer):
        return failed_checkpoint(evidence, wrong, 1)
    floor = TENSOR_FLOOR * evidence.free.unit_roundoff
    ratio = Ratio(_STATISTIC, answer.logits_error, max(evidence.reference.logits_noise, floor))
    judged = JudgedRatio(ratio, evidence.limits.of(_STATISTIC))
    if evidence.reference.training.draws and evidence.free.on_ranks:
        return LevelResult(Level(verdict=Outcome.NOT_COMPARED, reason=RANKS_DRAW)), None
    rows = [judged.measurement("users", "logits")]
    if judged.failed:
        reason = (
            f"the saved model computes different logits: relative error {answer.logits_error:.2e},"
            f" {ratio.value:.3g}x the noise run's (limit {judged.limit:.3g}x)"
        )
        return failed_checkpoint(evidence, reason, 1, rows)
    level = level_of(1, 0, {"noise_ratio": ratio.value, "limit": judged.limit})
    return LevelResult(level, rows), None


def judge_restart(evidence: CaseEvidence) -> tuple[LevelResult, DiagnosedFault | None]:
    """Compare the first loss of a run from the saved model with the next loss of the saving run."""
    if evidence.request.kind != "hugging-face":
        return LevelResult.not_run("only a Hugging Face checkpoint is restarted from"), None
    if not evidence.restarted:
        return failed_checkpoint(evidence, "there is no checkpoint to start another run from")
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
    return failed_checkpoint(evidence, reason, 1, rows)


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
        if error is None or not error <= EXACT_IN_FLOAT64:
            return f"the adapter {how} changes the logits: relative error {error}"
    return None


def failed_checkpoint(
    evidence: CaseEvidence, reason: str, compared: int = 0, rows: Sequence[Measurement] = ()
) -> tuple[LevelResult, DiagnosedFault]:
    """Return a failed level for a checkpoint."""
    options = evidence.request.candidate.options
    location = Location(phase="checkpoint", step=options.steps)
    level = Level(verdict=Outcome.FAIL, reason=reason, compared=compared)
    diagnosis = "adapter-mismatch" if options.lora else "checkpoint-mismatch"
    return LevelResult(level, list(rows)), DiagnosedFault(diagnosis, location, reason)  # type: ignore[arg-type]
