"""What users make of the last checkpoint's model: the logits of the run that wrote it, or others."""

from typing import Final

from assay.comparing.levels import Finding, JudgedRatio, LevelResult, level_of
from assay.noise import TENSOR_FLOOR, Ratio
from assay.verdicts import Level, Location, Outcome
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
        return LevelResult.not_run("there is no last checkpoint to be read"), None
    if answer.problem is not None or answer.logits_error is None:
        return _failed(evidence, f"the model cannot be loaded: {answer.problem}", 0)
    if wrong := _adapter_problem(answer):
        return _failed(evidence, wrong, 1)
    floor = TENSOR_FLOOR * evidence.free.unit_roundoff
    ratio = Ratio(_STATISTIC, answer.logits_error, max(evidence.reference.logits_noise, floor))
    judged = JudgedRatio(ratio, evidence.limits.of(_STATISTIC))
    if evidence.reference.training.draws and evidence.free.on_ranks:
        reason = "each rank draws the numbers of its own dropout"
        return LevelResult(Level(verdict=Outcome.NOT_COMPARED, reason=reason)), None
    if judged.failed:
        reason = (
            f"the model that users load computes other logits: relative error"
            f" {answer.logits_error:.2e}, {ratio.value:.3g}x the noise run's (limit"
            f" {judged.limit:.3g}x)"
        )
        return _failed(evidence, reason, 1, judged)
    level = level_of(1, 0, {"noise_ratio": ratio.value, "limit": judged.limit})
    return LevelResult(level, [judged.measurement("users", "logits")]), None


def judge_restart(evidence: CaseEvidence) -> tuple[LevelResult, Finding | None]:
    """Whether a run that starts from the saved model begins with the loss that the saving run had."""
    if not evidence.restarted:
        return LevelResult.not_run(
            "no case of another checkpoint than Hugging Face's restarts"
        ), None
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
    return _failed(evidence, reason, 1, judged)


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


def _failed(
    evidence: CaseEvidence, reason: str, compared: int, judged: JudgedRatio | None = None
) -> tuple[LevelResult, Finding]:
    options = evidence.request.candidate.options
    location = Location(phase="checkpoint", step=options.steps)
    level = Level(verdict=Outcome.FAIL, reason=reason, compared=compared)
    rows = [] if judged is None else [judged.measurement("users", "logits")]
    diagnosis = "adapter-mismatch" if options.lora else "checkpoint-mismatch"
    return LevelResult(level, rows), Finding(diagnosis, location, reason)  # type: ignore[arg-type]
