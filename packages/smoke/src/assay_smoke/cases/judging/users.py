"""What users make of the last checkpoint's model: the logits of the run that wrote it, or others."""

from collections.abc import Sequence
from typing import Final

from assay.comparing.levels import Finding, JudgedRatio, LevelResult, level_of
from assay.noise import TENSOR_FLOOR, Ratio
from assay.verdicts import Level, Location, Measurement, Outcome
from assay_smoke.cases.judging.evidence import CaseEvidence
from assay_smoke.cases.requests import ReadAnswer

# Merging multiplies and adds in float64; weights, and so logits, change by its rounding alone. A
# merge into float32 would leave 1e-8.
EXACT_IN_FLOAT64 = 1e-10

# By which limit the logits where a run ends are judged: they follow from where its parameters end.
_STATISTIC: Final = "trajectory-error"


def judge_reading(evidence: CaseEvidence) -> tuple[LevelResult, Finding | None]:
    """Whether the model that users load computes what the trained one has to."""
    answer = evidence.read
    if answer is None:
        return failed_checkpoint(evidence, "no last checkpoint was left to be read")
    if answer.problem is not None or answer.logits_error is None:
        return failed_checkpoint(evidence, f"the model cannot be loaded: {answer.problem}")
    if wrong := _adapter_problem(answer):
        return failed_checkpoint(evidence, wrong, 1)
    floor = TENSOR_FLOOR * evidence.free.unit_roundoff
    ratio = Ratio(_STATISTIC, answer.logits_error, max(evidence.reference.logits_noise, floor))
    judged = JudgedRatio(ratio, evidence.limits.of(_STATISTIC))
    if evidence.reference.training.draws and evidence.free.on_ranks:
        reason = "each rank draws the numbers of its own dropout"
        return LevelResult(Level(verdict=Outcome.NOT_COMPARED, reason=reason)), None
    rows = [judged.measurement("users", "logits")]
    if judged.failed:
        reason = (
            f"the model that users load computes other logits: relative error"
            f" {answer.logits_error:.2e}, {ratio.value:.3g}x the noise run's (limit"
            f" {judged.limit:.3g}x)"
        )
        return failed_checkpoint(evidence, reason, 1, rows)
    level = level_of(1, 0, {"noise_ratio": ratio.value, "limit": judged.limit})
    return LevelResult(level, rows), None


def judge_restart(evidence: CaseEvidence) -> tuple[LevelResult, Finding | None]:
    """Whether a run that starts from the saved model begins with the loss that the saving run had."""
    if evidence.request.kind != "hugging-face":
        return LevelResult.not_run("only what is saved for Hugging Face is restarted from"), None
    if not evidence.restarted:
        return failed_checkpoint(evidence, "no checkpoint was left to start another run from")
    resume_at = evidence.request.candidate.options.resume_at
    expected = evidence.free.report.free.steps[resume_at].loss
    error = abs(evidence.restarted[0].loss - expected) / abs(expected)
    floor = TENSOR_FLOOR * evidence.free.unit_roundoff
    judged = JudgedRatio(Ratio("loss-error", error, floor), evidence.limits.of("loss-error"))
    rows = [judged.measurement("restart", "loss")]
    if not judged.failed:
        return LevelResult(level_of(1, 0, {"noise_ratio": judged.ratio.value}), rows), None
    reason = (
        f"a run that starts from the saved model begins with the loss {evidence.restarted[0].loss}, the"
        f" run that saved it went on with {expected}"
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
        "merged and taken out again": answer.unmerged_error,
        "merged, saved and loaded": answer.exported_error,
    }
    for how, error in errors.items():
        if error is None or not error <= EXACT_IN_FLOAT64:
            return f"the adapter {how} gives other logits than beside the weights: relative error {error}"
    return None


def failed_checkpoint(
    evidence: CaseEvidence, reason: str, compared: int = 0, rows: Sequence[Measurement] = ()
) -> tuple[LevelResult, Finding]:
    """A level that fails for what was saved, or was not."""
    options = evidence.request.candidate.options
    location = Location(phase="checkpoint", step=options.steps)
    level = Level(verdict=Outcome.FAIL, reason=reason, compared=compared)
    diagnosis = "adapter-mismatch" if options.lora else "checkpoint-mismatch"
    return LevelResult(level, list(rows)), Finding(diagnosis, location, reason)  # type: ignore[arg-type]
