"""Judges if the candidate memorizes a few sequences as the reference does."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from assay.comparing.coverage import notes_on_coverage
from assay.comparing.levels import (
    EXACT_NUMBERS,
    DecidingNumbers,
    DiagnosedFault,
    LevelResult,
    conclude,
)
from assay.errors import name_some
from assay.training.judging.places import location_of_parameter
from assay.training.overfit.evidence import (
    LEVEL,
    MEMORIZED,
    NUM_FIRST,
    OverfitEvidence,
    last_part,
    typical,
    why_not_overfit,
)
from assay.training.overfit.memorization import LABELS
from assay.verdicts import Level, Location, Measurement, Outcome, Verdict

# A first loss that is off by more than this part of the gain of one update is not off by rounding.
_OF_ONE_UPDATE = 0.5


@dataclass(frozen=True, slots=True)
class _Failure(DiagnosedFault):
    """An error, and the measurement that shows it, if there is one."""

    reported: Measurement | None = None


def judge_overfit(evidence: OverfitEvidence) -> tuple[Verdict, list[Measurement]]:
    """Return the verdict and its measurements, which include the curves."""
    absent = why_not_overfit(evidence)
    rows = _curve_rows(evidence)
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
    found = [
        _find_non_finite(evidence),
        _find_unmoved(evidence),
        _find_unexpectedly_trained(evidence),
        _find_other_memorization(evidence),
        _find_other_start(evidence) if evidence.start in judged else None,
        _find_unlearned(evidence),
    ]
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
        what = "the adapter" if evidence.lora else "any parameter"
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


def _curve_rows(evidence: OverfitEvidence) -> list[Measurement]:
    """Return both curves step by step, for display only."""
    expected, noise = evidence.reference.yardstick, evidence.reference.noise
    sides = [("noise", noise)]
    if evidence.candidates:
        sides.insert(0, ("candidate", evidence.curve))
    return [
        Measurement(
            level=LEVEL,
            module="",
            port=port,
            step=step,
            statistic=f"{side}-{port}",
            actual=actual,
            expected=wanted,
            ratio=math.nan,
        )
        for side, curve in sides
        for port, values, yardstick in (
            ("loss", curve.losses, expected.losses),
            ("grad-norm", curve.grad_norms, expected.grad_norms),
        )
        for step, (actual, wanted) in enumerate(zip(values, yardstick, strict=True))
    ]


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
        f" {len(evidence.curve.losses)} steps; yardstick {evidence.first:.3g} to {yardstick:.3g},"
        f" noise run to {noise:.3g}, target {evidence.target:.3g}"
    )


def _nats(known: Mapping[str, float], expected: Mapping[str, float], kind: str) -> str:
    return f"{known[kind]:.3g} nats per token, the reference {expected[kind]:.3g}"


def _listed(losses: list[float]) -> str:
    return ", ".join(f"{loss:.5g}" for loss in losses[:NUM_FIRST])
