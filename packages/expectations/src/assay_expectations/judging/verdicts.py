"""The verdict over the expectations of a machine."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from assay.comparing.coverage import CoverageParts, judge_coverage
from assay.comparing.levels import (
    DecidingNumbers,
    deciding_numbers,
    find_worst,
    outcome_of_levels,
)
from assay.comparing.wording.coverage import (
    describe_coverage,
    list_gaps,
    notes_on_coverage,
)
from assay.comparing.wording.numerals import format_against
from assay.comparing.wording.phrases import describe_error
from assay.verdicts import (
    Coverage,
    Diagnosis,
    Level,
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


@dataclass(slots=True)
class _Judgement:
    """A verdict under construction."""

    levels: dict[str, Level] = field(default_factory=dict)
    judged: dict[str, JudgedSignature] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    coverages: list[Coverage] = field(default_factory=list)
    elsewhere: dict[str, str] = field(default_factory=dict)

    def verdict(
        self, models: Iterable[str], reference: str, candidate: str, location: Location | None
    ) -> Verdict:
        """Make the verdict of all levels."""
        unmatched = [
            name
            for name, level in self.levels.items()
            if not level.compared and name != _NO_EXPECTATION
        ]
        numbers: DecidingNumbers = {}
        diagnosis: Diagnosis | None = None
        if self.judged:
            worst = find_worst(judged.worst for judged in self.judged.values())
            numbers = deciding_numbers(worst, worst.resolution)
            # Only `assay check generate` can name a module.
            diagnosis = None if math.isfinite(worst.ratio.value) else "non-finite"
        return Verdict(
            verdict=outcome_of_levels(self.levels),
            model={"name": ", ".join(sorted(set(models)))},
            reference={"run": reference},
            candidate={"run": candidate},
            levels=self.levels,
            location=location,
            diagnosis=diagnosis,
            notes=self.notes,
            compared=sum(level.compared for level in self.levels.values()),
            unmatched=Unmatched(expected=unmatched),
            coverage=self.coverages[0] if len(self.levels) == len(self.coverages) == 1 else None,
            **numbers,
        )

    def measurements(self) -> list[Measurement]:
        """Return the rows of all levels."""
        return [row for name, one in self.judged.items() for row in one.measurements(name)]


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
    judgement = _Judgement()
    for name, expectation, seen in zip(_names(here.seen), expectations, here.seen, strict=True):
        if expectation.key.machine != here.machine:
            judgement.elsewhere[name] = _describe_elsewhere(name, expectation, seen, here)
        elif seen.observed is None:
            reason = seen.problem or f"stale, different content: {'; '.join(seen.stale)}"
            judgement.levels[name] = Level(
                verdict=Outcome.FAIL,
                reason=reason,
                expectation=expectation.hash,
                stale=bool(seen.stale),
            )
        else:
            _judge_one(name, expectation, seen.observed, here.versions, run, judgement)
            _require_coverage(name, seen, allow_unused, judgement)
    if not judgement.levels:
        reason = "; ".join(judgement.elsewhere.values())
        judgement.levels[_NO_EXPECTATION] = Level(verdict=Outcome.NOT_COMPARED, reason=reason)
    else:
        judgement.notes += _condense(judgement.elsewhere)
    models = [expectation.model for expectation in expectations]
    verdict = judgement.verdict(models, "the captures", run, None)
    return verdict, judgement.measurements()


def _judge_one(
    name: str,
    expectation: Expectation,
    observed: Observed,
    versions: Mapping[str, str],
    run: str,
    judgement: _Judgement,
) -> None:
    judged = judge_by(expectation, observed.distributions)
    changed = value_differences(expectation.provenance.versions, versions)
    if changed:
        judgement.notes.append(f"{name}: changed since its capture: {', '.join(changed)}")
    reason = None
    if not judged.passed:
        reason = _describe_failure(judged, expectation, observed)
        judgement.notes.append(
            f"to find the module: assay check generate {expectation.model}"
            f" --reference cpu/float32 --candidate {run}; if that passes, both sides share the fault, in the"
            " model's code or in assay's, and `git bisect` with this command finds the commit"
        )
    judgement.judged[name] = judged
    judgement.levels[name] = Level(
        verdict=Outcome.PASS if judged.passed else Outcome.FAIL,
        reason=reason,
        compared=judged.num_tokens,
        limits_origin=expectation.limits_origin,
        expectation=expectation.hash,
        since_capture=changed,
    )


def _describe_failure(judged: JudgedSignature, expectation: Expectation, observed: Observed) -> str:
    worst = judged.worst
    ratio, limit = format_against(worst.ratio.value, worst.limit)
    reason = (
        f"{describe_error(worst.ratio.statistic, worst.ratio.actual)} is {ratio}x the error of the captured run"
        f" (limit {limit}x)"
    )
    dtype = expectation.key.machine.dtype
    likeness = describe_likeness(expectation.signature, observed, dtype, judged)
    return f"{likeness}; {reason}" if likeness else reason


def _require_coverage(
    name: str, seen: Seen, allow_unused: Sequence[str], judgement: _Judgement
) -> None:
    """Change a PASS to NOT_COMPARED if part of the model did not contribute."""
    if seen.usage is None:
        return
    coverage = judge_coverage(CoverageParts(seen.usage, seen.usage, allowed=allow_unused))
    level = judgement.levels[name]
    update: dict[str, object] = {"coverage": describe_coverage(coverage)}
    if coverage.forbidden_gaps and level.verdict is Outcome.PASS:
        reason = f"{'; '.join(list_gaps(coverage))}; --allow-unused GLOB passes without them"
        update |= {"verdict": Outcome.NOT_COMPARED, "reason": reason}
    judgement.levels[name] = level.model_copy(update=update)
    judgement.notes += [f"{name}: {note}" for note in notes_on_coverage(coverage)]
    judgement.coverages.append(coverage)


def judge_pair(
    expected: Expectation, actual: Expectation
) -> tuple[Verdict, list[Measurement], Change]:
    """Judge the capture `actual` by the limits of `expected`, and describe the change."""
    judgement = _Judgement()
    change = find_change(expected, actual)
    if change.judged is None:
        reason = "; ".join(change.content)
        judgement.levels["signature"] = Level(verdict=Outcome.NOT_COMPARED, reason=reason)
    else:
        judgement.judged["signature"] = change.judged
        judgement.levels["signature"] = Level(
            verdict=Outcome.PASS if change.judged.passed else Outcome.FAIL,
            reason=change.summary,
            compared=change.judged.num_tokens,
            limits_origin=expected.limits_origin,
            change=change.kind,
        )
    judgement.notes += change.environment
    location = None
    if change.kind == "break" and change.grown:
        location = Location(phase="forward", module=change.grown[0].module)
    models = (expected.model, actual.model)
    verdict = judgement.verdict(models, expected.name, actual.name, location)
    return verdict, judgement.measurements(), change


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
