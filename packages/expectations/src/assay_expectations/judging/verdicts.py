"""The verdict over the expectations of a machine."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from assay.comparing.coverage import (
    CoverageParts,
    describe_coverage,
    judge_coverage,
    list_gaps,
    notes_on_coverage,
)
from assay.comparing.levels import (
    Cause,
    DecidingNumbers,
    LevelResult,
    conclude,
    deciding_numbers,
    failed,
    find_worst,
    not_compared,
    notes_of,
    rows_of,
)
from assay.comparing.wording import describe_error, format_against
from assay.verdicts import (
    Coverage,
    Diagnosis,
    Location,
    Measurement,
    Outcome,
    Unmatched,
    Verdict,
)
from assay_expectations.judging.changes import Change, find_change
from assay_expectations.judging.numbers import JudgedSignature, describe_likeness, judge_by
from assay_expectations.records import (
    Expectation,
    Observed,
    machine_differences,
    value_differences,
)
from assay_expectations.requests import AllSeen, Seen

# Level name if nothing was captured on this machine.
_NO_EXPECTATION = "expectations"
# More notes about other machines would hide failures.
_MAX_NOTES = 3


def judge_seen(
    run: str,
    expectations: Sequence[Expectation],
    here: AllSeen,
    allow_unused: Sequence[str] = (),
) -> tuple[Verdict, list[Measurement]]:
    """Return the verdict over the observations of all expectations, and its measurements.

    Expectations of other machines are excluded.
    allow_unused: GLOBs of modules, parameters and experts that may stay uncompared.
    """
    results: dict[str, LevelResult] = {}
    elsewhere: dict[str, str] = {}
    coverages: list[Coverage] = []
    for name, expectation, seen in zip(_names(here.seen), expectations, here.seen, strict=True):
        if expectation.key.machine != here.machine:
            elsewhere[name] = _describe_elsewhere(name, expectation, seen, here)
        elif seen.observed is None:
            reason = seen.problem or f"stale, different content: {'; '.join(seen.stale)}"
            results[name] = failed(0, reason, expectation=expectation.hash, stale=bool(seen.stale))
        else:
            results[name] = _judge_one(name, expectation, seen.observed, here.versions, run)
            if seen.usage is not None:
                parts = CoverageParts(seen.usage, seen.usage, allowed=allow_unused)
                coverages.append(judge_coverage(parts))
                _require_coverage(name, results[name], coverages[-1])
    notes = _condense(elsewhere)
    if not results:
        reason, notes = "; ".join(elsewhere.values()), []
        results[_NO_EXPECTATION] = not_compared(reason)
    return _combine(
        results,
        notes,
        model={"name": ", ".join(sorted({expectation.model for expectation in expectations}))},
        reference={"run": "the captures"},
        candidate={"run": run},
        coverage=coverages[0] if len(results) == len(coverages) == 1 else None,
    )


def _combine(
    results: Mapping[str, LevelResult],
    notes: Sequence[str],
    location: Location | None = None,
    **fields: Any,  # noqa: ANN401 - more fields of the verdict
) -> tuple[Verdict, list[Measurement]]:
    """Make the verdict over all levels, with `fields`, and its measurements."""
    judged = [ratio for one in results.values() for ratio in one.judged]
    numbers: DecidingNumbers = {}
    diagnosis: Diagnosis | None = None
    if judged:
        worst = find_worst(judged)
        numbers = deciding_numbers(worst, worst.resolution)
        # Only `assay check generate` can name a module.
        diagnosis = None if math.isfinite(worst.value) else "non-finite"
    unmatched = [
        name for name, one in results.items() if not one.level.compared and name != _NO_EXPECTATION
    ]
    verdict = conclude(
        results,
        Cause(diagnosis, location),
        notes=[*notes_of(results), *notes],
        unmatched=Unmatched(expected=unmatched),
        **numbers,
        **fields,
    )
    return verdict, rows_of(results)


def _judge_one(
    name: str, expectation: Expectation, observed: Observed, versions: Mapping[str, str], run: str
) -> LevelResult:
    judged = judge_by(expectation, observed.distributions)
    notes = []
    changed = value_differences(expectation.provenance.versions, versions)
    if changed:
        notes.append(f"{name}: changed since its capture: {', '.join(changed)}")
    reason = None
    if not judged.passed:
        reason = _describe_failure(judged, expectation, observed)
        notes.append(
            f"to find the module: assay check generate {expectation.model}"
            f" --reference cpu/float32 --candidate {run}; if that passes, both sides share the fault, in the"
            " model's code or in assay's, and `git bisect` with this command finds the commit"
        )
    facts = {
        "limits_origin": expectation.limits_origin,
        "expectation": expectation.hash,
        "since_capture": changed,
    }
    return judged.as_level(name, reason, notes, facts)


def _describe_failure(judged: JudgedSignature, expectation: Expectation, observed: Observed) -> str:
    worst = judged.worst
    ratio, limit = format_against(worst.value, worst.limit)
    reason = (
        f"{describe_error(worst.statistic, worst.actual)} is {ratio}x the error of the captured run"
        f" (limit {limit}x)"
    )
    dtype = expectation.key.machine.dtype
    likeness = describe_likeness(expectation.signature, observed, dtype, judged)
    return f"{likeness}; {reason}" if likeness else reason


def _require_coverage(name: str, result: LevelResult, coverage: Coverage) -> None:
    """Change a PASS to NOT_COMPARED if part of the model did not contribute."""
    update: dict[str, object] = {"coverage": describe_coverage(coverage)}
    if coverage.forbidden_gaps and result.level.verdict is Outcome.PASS:
        reason = f"{'; '.join(list_gaps(coverage))}; --allow-unused GLOB passes without them"
        update |= {"verdict": Outcome.NOT_COMPARED, "reason": reason}
    result.level = result.level.model_copy(update=update)
    result.notes += [f"{name}: {note}" for note in notes_on_coverage(coverage)]


def judge_pair(
    expected: Expectation, actual: Expectation
) -> tuple[Verdict, list[Measurement], Change]:
    """Judge the capture `actual` by the limits of `expected`, and describe the change."""
    change, level = find_change(expected, actual), "signature"
    if change.judged is None:
        reason = "; ".join(change.content)
        result = not_compared(reason)
    else:
        facts = {"limits_origin": expected.limits_origin, "change": change.kind}
        result = change.judged.as_level(level, change.summary, [], facts)
    location = None
    if change.kind == "break" and change.grown:
        location = Location(phase="forward", module=change.grown[0].module)
    verdict, rows = _combine(
        {level: result},
        change.environment,
        model={"name": ", ".join(sorted({expected.model, actual.model}))},
        reference={"run": expected.name},
        candidate={"run": actual.name},
        location=location,
    )
    return verdict, rows, change


def _describe_elsewhere(name: str, expectation: Expectation, seen: Seen, here: AllSeen) -> str:
    """Describe an expectation of another machine, with its result here if it was observed."""
    differing = ", ".join(machine_differences(expectation.key.machine, here.machine))
    description = f"{name} belongs to another machine: {differing}"
    if seen.observed is None:
        return description
    result = judge_by(expectation, seen.observed.distributions).describe_worst("its noise")
    return f"{description}; it is not judged here, where {result}"


def _condense(elsewhere: Mapping[str, str]) -> list[str]:
    """Return the descriptions, or a single note if there are many."""
    if len(elsewhere) <= _MAX_NOTES:
        return list(elsewhere.values())
    return [f"{len(elsewhere)} expectations belong to other machines: {', '.join(elsewhere)}"]


def _names(seen: Sequence[Seen]) -> list[str]:
    """Return the file names, or whole paths if two names are equal."""
    stems = [Path(one.file).stem for one in seen]
    unique = len(set(stems)) == len(stems)
    return stems if unique else [one.file for one in seen]
