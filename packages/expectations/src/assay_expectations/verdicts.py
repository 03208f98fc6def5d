"""One verdict over the expectations of a machine."""

import math
from collections.abc import Sequence
from pathlib import Path

from assay.comparing.levels import (
    DecidingNumbers,
    deciding_numbers,
    find_worst,
    outcome_of_levels,
)
from assay.verdicts import (
    Diagnosis,
    Level,
    Measurement,
    Outcome,
    Unmatched,
    Verdict,
)
from assay_expectations.judging import JudgedSignature, judge_numbers
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
    judgements: dict[str, JudgedSignature] = {}
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
    judgements: dict[str, JudgedSignature] = {}
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


def _level_of(judgement: JudgedSignature, expectation: Expectation) -> Level:
    outcome = Outcome.PASS if judgement.passed else Outcome.FAIL
    return Level.model_validate(
        {
            "verdict": outcome,
            "compared": judgement.num_tokens,
            "limits_origin": expectation.limits_origin,
        }
    )


def _verdict(levels: dict[str, Level], judgements: dict[str, JudgedSignature]) -> Verdict:
    unmatched = [
        name for name, level in levels.items() if not level.compared and name != _NO_EXPECTATION
    ]
    numbers: DecidingNumbers = {}
    diagnosis: Diagnosis | None = None
    if judgements:
        worst = find_worst(judgement.worst for judgement in judgements.values())
        numbers = deciding_numbers(worst, worst.resolution)
        # Which module it was is a question for `assay check generate`.
        diagnosis = None if math.isfinite(worst.ratio.value) else "non-finite"
    return Verdict(
        verdict=outcome_of_levels(levels),
        levels=levels,
        diagnosis=diagnosis,
        compared=sum(level.compared for level in levels.values()),
        unmatched=Unmatched(expected=unmatched),
        **numbers,
    )


def _measurements(judgements: dict[str, JudgedSignature]) -> list[Measurement]:
    return [row for name, judgement in judgements.items() for row in judgement.measurements(name)]


def _level(outcome: Outcome, reason: str) -> Level:
    return Level(verdict=outcome, reason=reason)


def _joined(names: set[str]) -> str:
    return ", ".join(sorted(names))
