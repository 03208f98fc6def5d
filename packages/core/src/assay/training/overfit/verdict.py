"""Judges if the candidate memorizes a few sequences as the reference does.

The target is the loss that the trusted device reaches on the same sequences in as many steps. The
first losses, before rounding errors grow, are compared with the noise run's.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any

from assay.dtypes import float_format
from assay.errors import name_some
from assay.judge.coverage import CoverageParts, judge_coverage, notes_on_coverage
from assay.judge.levels import (
    EXACT_NUMBERS,
    DecidingNumbers,
    DiagnosedFault,
    LevelResult,
    conclude,
)
from assay.judge.limits import Limits
from assay.noise import TENSOR_FLOOR
from assay.statistics import worst_error
from assay.training.judging.evidence import location_of_parameter
from assay.training.judging.free_run import relative_error_of_losses, rows_of_curves
from assay.training.overfit.sides import LABELS
from assay.training.reports import (
    LossCurve,
    Memorization,
    OverfitCandidate,
    OverfitReference,
    TrainCheck,
)
from assay.verdicts import Coverage, Level, Location, Measurement, Outcome, Verdict

LEVEL = "overfit"

# Below this loss the right token is likelier than all others together, as a geometric mean.
MEMORIZED = math.log(2)

# A memorized sequence must have at most this share of the first loss: it was not known before.
_SHARE_OF_FIRST = 1 / 4

# The final loss of a curve is the median over this share of its steps.
_LAST_SHARE = 1 / 5

# The candidate may need twice the reference's steps for the same loss: on a plateau, correct runs
# with other orders of summation end several percent apart.
_TARGET_SHARE = 1 / 2

# Number of losses compared one by one. Later, rounding errors have grown into another trajectory. The
# limits of loss-error are calibrated on as many losses.
NUM_FIRST = 3


@dataclass(frozen=True)
class OverfitEvidence:
    """The evidence of both sides."""

    check: TrainCheck
    reference: OverfitReference
    limits: Limits
    candidates: list[OverfitCandidate] = field(default_factory=list)
    """One for each rank; empty if the reference has not memorized the sequences."""
    memorization: Memorization | None = None

    @cached_property
    def coverage(self) -> Coverage:
        """Judge how much of the model is used to predict the sequences, on the reference's side."""
        allowed = self.check.allow_unused
        return judge_coverage(CoverageParts(self.reference.usage, None, allowed=allowed))

    @cached_property
    def reached(self) -> float:
        """Return the higher of the final losses of yardstick and noise run."""
        curves = (self.reference.yardstick, self.reference.noise)
        return worst_error(typical(last_part(curve.losses)) for curve in curves)

    @cached_property
    def target(self) -> float:
        """Return the highest loss of yardstick and noise run in the second half of their steps.

        It is at most the geometric mean of the first and the reached loss.
        """
        curves = (self.reference.yardstick.losses, self.reference.noise.losses)
        late = worst_error(loss for losses in curves for loss in last_part(losses, _TARGET_SHARE))
        return min(late, math.sqrt(self.first * self.reached))

    @property
    def first(self) -> float:
        """The reference's loss before any step."""
        return self.reference.yardstick.losses[0]

    @property
    def curve(self) -> LossCurve:
        """The candidate's curve."""
        return self.candidates[0].curve

    @cached_property
    def start(self) -> Measurement:
        """Measure the first losses, before rounding errors grow."""
        expected = self.reference.yardstick.losses[:NUM_FIRST]
        actual = relative_error_of_losses(self.curve.losses[:NUM_FIRST], expected)
        noise = relative_error_of_losses(self.reference.noise.losses[:NUM_FIRST], expected)
        floor = TENSOR_FLOOR * float_format(self.check.dtype).unit_roundoff
        ratio = actual / max(noise, floor)
        return _row("loss-error", actual, noise, ratio, limit=self.limits.of("loss-error"))

    @cached_property
    def end(self) -> Measurement:
        """Measure the final loss against the target."""
        return _against_target("overfit-loss", typical(last_part(self.curve.losses)), self.target)

    @cached_property
    def memorized(self) -> Measurement | None:
        """Measure the loss of the trained weights on the labels.

        The last step may be as bad as any step near the end.
        """
        if self.memorization is None or not self.memorization.nats:
            return None
        allowed = max(self.target, worst_error(last_part(self.curve.losses)))
        return _against_target("overfit-memorization", self.memorization.nats[LABELS], allowed)


def last_part(losses: list[float], share: float = _LAST_SHARE) -> list[float]:
    """Return the losses at the end of a curve."""
    return losses[-max(1, round(share * len(losses))) :]


def why_not_overfit(evidence: OverfitEvidence) -> str | None:
    """Explain why the reference provides no target; None if it does."""
    reached, first = evidence.reached, evidence.first
    steps = len(evidence.reference.yardstick.losses)
    if not math.isfinite(reached):
        return f"the noise run itself has a loss of {reached}: there is no target"
    allowed = min(MEMORIZED, _SHARE_OF_FIRST * first)
    if reached > allowed:
        return (
            f"in {steps} steps the reference itself gets from {first:.3g} to {reached:.3g} nats per"
            f" label token, and not below {allowed:.3g}: there is no target; more --overfit-steps"
            " or another --learning-rate may give one"
        )
    return None


def _row(
    statistic: str,
    actual: float,
    expected: float,
    ratio: float,
    **facts: Any,  # noqa: ANN401 - of Measurement
) -> Measurement:
    """Return a row of measurements of the whole model; `facts` are further fields."""
    return Measurement(
        level=LEVEL, module="", port="loss", statistic=statistic, actual=actual,
        expected=expected, ratio=ratio, **facts,
    )  # fmt: skip


def _against_target(statistic: str, actual: float, target: float) -> Measurement:
    return _row(statistic, actual, target, actual / target, limit=1.0, phase="optimizer")


def typical(losses: list[float]) -> float:
    """Return the median; NaN if any loss is NaN."""
    return math.nan if any(map(math.isnan, losses)) else median(losses)


# A first loss that is off by more than this part of the gain of one update is not off by rounding.
_OF_ONE_UPDATE = 0.5


@dataclass(frozen=True, slots=True)
class _Failure(DiagnosedFault):
    """An error, and the measurement that shows it, if there is one."""

    reported: Measurement | None = None


def judge_overfit(evidence: OverfitEvidence) -> tuple[Verdict, list[Measurement]]:
    """Return the verdict and its measurements, which include the curves."""
    absent = why_not_overfit(evidence)
    curves = {"candidate": evidence.curve} if evidence.candidates else {}
    rows = rows_of_curves(
        curves | {"noise": evidence.reference.noise}, evidence.reference.yardstick
    )
    failures: list[_Failure] = []
    notes: list[str] = []
    facts: dict[str, object] = {
        "first_loss": evidence.first,
        "reference_final_loss": evidence.reached,
        "target": evidence.target,
        "steps": len(evidence.reference.yardstick.losses),
        "limits_origin": evidence.limits.origin,
    }
    if absent is None:
        judged, notes = _judged_rows(evidence)
        rows = judged + rows
        failures = _find_all(evidence, judged)
        facts["final_loss"] = evidence.end.actual
        if evidence.memorization is not None:
            facts["memorization"] = dict(evidence.memorization.nats)
        if failures:
            outcome, reason = Outcome.FAIL, failures[0].reason
            notes += [failure.reason or "" for failure in failures[1:]]
        elif evidence.memorized is None:
            missing = evidence.memorization.missing if evidence.memorization else []
            outcome = Outcome.NOT_COMPARED
            reason = f"the trained weights are not of this model: without {name_some(missing)}"
        else:
            outcome, reason = Outcome.PASS, None
        notes.append(_describe_end(evidence))
    else:
        outcome, reason = Outcome.NOT_COMPARED, absent
    notes.append(
        "only convergence was checked: without --overfit every stage of a step is compared, which"
        " names the one that is wrong"
    )
    compared = sum(row.limit is not None for row in rows)
    first = failures[0] if failures else None
    level = Level(verdict=outcome, reason=reason, compared=compared, **facts)
    notes += notes_on_coverage(evidence.coverage)
    verdict = conclude(
        {LEVEL: LevelResult(level)},
        first,
        notes=notes,
        coverage=evidence.coverage,
        model=evidence.reference.model,
        reference=evidence.reference.reference,
        candidate=evidence.candidates[0].run if evidence.candidates else {},
        **_decide_numbers(first, rows),
    )
    return verdict, rows


def _judged_rows(evidence: OverfitEvidence) -> tuple[list[Measurement], list[str]]:
    rows, notes = [evidence.end], []
    if evidence.reference.draws and len(evidence.candidates) > 1:
        notes.append(
            "first losses are not compared: each rank draws the numbers of its own dropout"
        )
    else:
        rows.insert(0, evidence.start)
    if evidence.memorized is not None:
        rows.append(evidence.memorized)
    counted = evidence.candidates[0].num_tokens
    if counted != [evidence.reference.num_tokens]:
        notes.append(
            f"the trainer counts {counted} label tokens in a step, the reference"
            f" {evidence.reference.num_tokens}"
        )
    different = evidence.candidates[0].weights_different
    if different:
        notes.append(
            f"weights differ from the reference's before the first step: {name_some(different)}"
        )
    return rows, notes


def _find_all(evidence: OverfitEvidence, judged: list[Measurement]) -> list[_Failure]:
    """Find all errors, causes before consequences."""
    found = (
        _find_non_finite(evidence),
        _find_unmoved(evidence),
        _find_unexpectedly_trained(evidence),
        _find_other_memorization(evidence),
        _find_other_start(evidence) if evidence.start in judged else None,
        _find_unlearned(evidence),
    )
    return [failure for failure in found if failure is not None]


def _find_non_finite(evidence: OverfitEvidence) -> _Failure | None:
    losses = evidence.curve.losses
    step = next((step for step, loss in enumerate(losses) if not math.isfinite(loss)), None)
    if step is None:
        return None
    reason = f"it diverges: the loss of step {step} is {losses[step]}"
    return _Failure("non-finite", Location(phase="forward", step=step, op="loss"), reason)


def _find_unmoved(evidence: OverfitEvidence) -> _Failure | None:
    kept = {name for report in evidence.candidates for name in report.unmoved}
    expected = set(evidence.reference.moved) & set(evidence.reference.trainable)
    frozen = sorted(kept & expected)
    if not frozen:
        return None
    if len(frozen) == len(expected):
        what = "the adapter" if evidence.check.options.lora else "any parameter"
        reason = f"nothing is trained: no step changes a bit of {what}"
        return _Failure("frozen-parameters", Location(phase="optimizer"), reason)
    reason = f"{len(frozen)} of {len(expected)} parameters are never changed: {name_some(frozen)}"
    return _Failure("frozen-parameters", location_of_parameter("optimizer", frozen[0]), reason)


def _find_unexpectedly_trained(evidence: OverfitEvidence) -> _Failure | None:
    touched = {name for report in evidence.candidates for name in report.touched}
    reference = evidence.reference
    unexpectedly_trained = sorted(touched - set(reference.trainable) - set(reference.touched))
    if not unexpectedly_trained:
        return None
    reason = f"trained, and should not be: {name_some(unexpectedly_trained)}"
    location = location_of_parameter("optimizer", unexpectedly_trained[0])
    return _Failure("optimizer-update", location, reason)


def _find_other_memorization(evidence: OverfitEvidence) -> _Failure | None:
    if evidence.memorization is None:
        return None
    known, expected = evidence.memorization.nats, evidence.reference.memorization.nats
    others = [kind for kind in known if kind != LABELS and _is_learned(kind, evidence)]
    if not others:
        return None
    reported = "; ".join(
        f"{_MEMORIZED_INSTEAD[kind]} ({_nats(known, expected, kind)})" for kind in others
    )
    reason = f"it memorizes what it should not: {reported}"
    return _Failure("inputs-differ", Location(phase="inputs"), reason)


def _is_learned(kind: str, evidence: OverfitEvidence) -> bool:
    """Return True if a loss is nearer, by ratio, to a memorized one than to the reference's.

    A kind that the reference itself predicts well, such as repeated text, does not count.
    """
    if evidence.memorization is None:
        return False
    known, expected = (
        evidence.memorization.nats[kind],
        evidence.reference.memorization.nats.get(kind, 0.0),
    )
    return expected > MEMORIZED and known <= math.sqrt(evidence.reached * expected)


_MEMORIZED_INSTEAD: Mapping[str, str] = {
    "prompt": "the prompt, whose labels are masked",
    "padding": "the padding, which is masked out of the labels",
    "labels not shifted": "each label at its own place instead of the place before it",
    "labels shifted twice": "the label after the next one",
}


def _find_other_start(evidence: OverfitEvidence) -> _Failure | None:
    row = evidence.start
    if not _over(row):
        return None
    actual, expected = evidence.curve.losses, evidence.reference.yardstick.losses
    differences = [abs(a - e) for a, e in zip(actual, expected, strict=False)][:NUM_FIRST]
    step = differences.index(max(differences))
    reason = (
        f"the first losses are not the reference's: {_listed(actual)} instead of"
        f" {_listed(expected)} nats per label token"
    )
    # The loss of step 0 is computed before any update.
    before = abs(actual[0] - expected[0]) > _OF_ONE_UPDATE * abs(expected[0] - expected[1])
    if step == 0 or before:
        return _Failure("loss-scale", Location(phase="forward", op="loss"), reason, row)
    return _Failure("optimizer-update", Location(phase="optimizer", step=0), reason, row)


def _find_unlearned(evidence: OverfitEvidence) -> _Failure | None:
    end, memorization = evidence.end, evidence.memorized
    last = len(evidence.curve.losses) - 1
    location = Location(phase="optimizer", step=last)
    if _over(end):
        reason = (
            f"it does not learn as the reference does: after {last + 1} steps its loss is"
            f" {end.actual:.3g} nats per label token, the target {end.expected:.3g}"
        )
        return _Failure("optimizer-update", location, reason, end)
    if memorization is not None and _over(memorization):
        reason = (
            f"it memorizes something else: its losses end at {end.actual:.3g} nats per label token, its"
            f" weights give {memorization.actual:.3g} on the trusted device"
        )
        return _Failure("inputs-differ", Location(phase="inputs"), reason, memorization)
    return None


def _decide_numbers(first: _Failure | None, rows: list[Measurement]) -> DecidingNumbers:
    """Return the numbers of the first failure, else of the first losses, else of the last ones."""
    judged = {row.statistic: row for row in rows if row.limit is not None}
    if first is not None and first.reported is None:
        return EXACT_NUMBERS
    reported = first.reported if first else judged.get("loss-error", judged.get("overfit-loss"))
    if reported is None:
        return {}
    start = judged.get("loss-error")
    # The smallest relative error of the first losses that would have failed.
    resolution = start.actual / start.ratio * (start.limit or 0) if start and start.ratio else None
    return {
        "noise_ratio": reported.ratio,
        "limit": reported.limit,
        "statistic": reported.statistic,
        "resolution": resolution,
    }


def _over(row: Measurement) -> bool:
    return not row.ratio <= (row.limit or 0)


def _describe_end(evidence: OverfitEvidence) -> str:
    reference = evidence.reference
    yardstick, noise = (
        typical(last_part(one.losses)) for one in (reference.yardstick, reference.noise)
    )
    return (
        f"from {evidence.curve.losses[0]:.3g} to {evidence.end.actual:.3g} nats per label token in"
        f" {len(evidence.curve.losses)} steps; exact reference {evidence.first:.3g} to {yardstick:.3g},"
        f" noise run to {noise:.3g}, target {evidence.target:.3g}"
    )


def _nats(known: Mapping[str, float], expected: Mapping[str, float], kind: str) -> str:
    return f"{known[kind]:.3g} nats per token, the reference {expected[kind]:.3g}"


def _listed(losses: list[float]) -> str:
    return ", ".join(f"{loss:.5g}" for loss in losses[:NUM_FIRST])
