"""One verdict over the expectations of a machine."""

import math
from collections.abc import Sequence
from pathlib import Path

from assay.verdicts import (
    Diagnosis,
    Level,
    Measurement,
    Outcome,
    Unmatched,
    Verdict,
    overall_outcome,
)
from assay_expectations.judging import Judgement, judge_numbers
from assay_expectations.records import Expectation, differences
from assay_expectations.requests import Seen

# The level of a machine that nothing was captured on.
_NO_EXPECTATION = "expectations"


def judge_seen(
    run: str, pairs: Sequence[tuple[Expectation, Seen]]
) -> tuple[Verdict, list[Measurement]]:
    """The verdict over what was seen of each expectation, and its measurements.

    Those of other machines are no part of it: another run, elsewhere, is for them.
    """
    levels: dict[str, Level] = {}
    judgements: dict[str, Judgement] = {}
    elsewhere: list[str] = []
    hints: list[str] = []
    for name, (expectation, seen) in zip(_names(pairs), pairs, strict=True):
        if seen.key is None:
            differing = differences(expectation.key.machine, seen.machine)
            elsewhere.append(f"{name} is of another machine: {', '.join(differing)}")
        elif stale := differences(expectation.key.content, seen.key.content):
            levels[name] = _level(Outcome.FAIL, f"stale, nothing can meet it: {', '.join(stale)}")
        elif seen.key != expectation.key:
            differing = differences(expectation.key, seen.key)
            levels[name] = _level(Outcome.NOT_COMPARED, ", ".join(differing))
        else:
            judgements[name] = judge_numbers(expectation, seen.log_probabilities)
            levels[name] = _level_of(judgements[name], expectation)
            if not judgements[name].passed:
                hints.append(
                    f"to find the place: assay check generate {expectation.model}"
                    f" --reference cpu/float32 --candidate {run}"
                )
    if not levels:
        levels[_NO_EXPECTATION] = _level(Outcome.NOT_COMPARED, "; ".join(elsewhere))
    notes = [*hints, *elsewhere] if judgements else []
    verdict = _verdict(levels, judgements).model_copy(
        update={
            "model": {"name": _joined({expectation.model for expectation, _ in pairs})},
            "reference": {"run": "what was captured"},
            "candidate": {"run": run},
            "notes": notes,
        }
    )
    return verdict, _measurements(judgements)


def judge_pair(expected: Expectation, actual: Expectation) -> tuple[Verdict, list[Measurement]]:
    """Does what was captured in `actual` agree with `expected`, by its limits?"""
    levels: dict[str, Level] = {}
    judgements: dict[str, Judgement] = {}
    content = differences(expected.key.content, actual.key.content)
    same_tokens = (
        expected.signature.tokens == actual.signature.tokens
        and expected.signature.top_ids == actual.signature.top_ids
    )
    if content or not same_tokens:
        reason = ", ".join(content) or "their yardsticks chose other tokens"
        levels["signature"] = _level(Outcome.NOT_COMPARED, reason)
    else:
        judgements["signature"] = judge_numbers(expected, actual.signature.captured)
        levels["signature"] = _level_of(judgements["signature"], expected)
    verdict = _verdict(levels, judgements).model_copy(
        update={
            "model": {"name": _joined({expected.model, actual.model})},
            "reference": {"run": expected.name},
            "candidate": {"run": actual.name},
            "notes": differences(expected.key, actual.key),
        }
    )
    return verdict, _measurements(judgements)


def _names(pairs: Sequence[tuple[Expectation, Seen]]) -> list[str]:
    """Names of the files, whole paths where two have the same."""
    stems = [Path(seen.file).stem for _, seen in pairs]
    unique = len(set(stems)) == len(stems)
    return stems if unique else [seen.file for _, seen in pairs]


def _level_of(judgement: Judgement, expectation: Expectation) -> Level:
    outcome = Outcome.PASS if judgement.passed else Outcome.FAIL
    return Level.model_validate(
        {
            "verdict": outcome,
            "compared": judgement.num_tokens,
            "limits_origin": expectation.limits_origin,
        }
    )


def _verdict(levels: dict[str, Level], judgements: dict[str, Judgement]) -> Verdict:
    worst = max(
        judgements.values(),
        key=lambda judgement: judgement.worst.value / judgement.limits[judgement.worst.statistic],
        default=None,
    )
    unmatched = [
        name for name, level in levels.items() if not level.compared and name != _NO_EXPECTATION
    ]
    verdict = Verdict(
        verdict=overall_outcome([level.verdict for level in levels.values() if level.verdict]),
        levels=levels,
        compared=sum(level.compared for level in levels.values()),
        unmatched=Unmatched(expected=unmatched),
    )
    if worst is None:
        return verdict
    # Which module it was is a question for `assay check generate`.
    diagnosis: Diagnosis | None = None if math.isfinite(worst.worst.value) else "non-finite"
    return verdict.model_copy(
        update={
            "noise_ratio": worst.worst.value,
            "limit": worst.limits[worst.worst.statistic],
            "statistic": worst.worst.statistic,
            "resolution": worst.resolution,
            "diagnosis": diagnosis,
        }
    )


def _measurements(judgements: dict[str, Judgement]) -> list[Measurement]:
    return [row for name, judgement in judgements.items() for row in judgement.measurements(name)]


def _level(outcome: Outcome, reason: str) -> Level:
    return Level(verdict=outcome, reason=reason)


def _joined(names: set[str]) -> str:
    return ", ".join(sorted(names))
