"""Levels, findings and deciding numbers of a verdict, from judged ratios. Imports no torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypedDict, TypeVar

from assay.errors import name_some
from assay.sites import Phase
from assay.statistics import GENERAL
from assay.verdicts import (
    Coverage,
    Diagnosis,
    Level,
    Location,
    Measurement,
    Outcome,
    Ratio,
    TokenPosition,
    Unmatched,
    Verdict,
    overall_outcome,
)

# The level of each phase of a training step.
LEVEL_OF_PHASE: dict[Phase, str] = {
    "inputs": "inputs", "forward": "activations", "backward": "gradients", "reduce": "gradients",
    "clip": "gradients", "optimizer": "updates", "checkpoint": "checkpoint", "sampler": "sampler",
}  # fmt: skip


def level_at(location: Location) -> str:
    """Return the level that judges what `location` names."""
    is_loss = (location.phase, location.op) == ("forward", "loss")
    return "loss" if is_loss else LEVEL_OF_PHASE[location.phase]


# Largest number of names or suspects in a verdict; the measurements hold all.
MOST_LISTED = 50


Item = TypeVar("Item", bound=Ratio)


@dataclass(frozen=True, slots=True)
class DiagnosedFault:
    """A diagnosis and its place."""

    diagnosis: Diagnosis
    location: Location
    reason: str | None = None
    """The cause in words, if no ratio shows it."""


class Cause(NamedTuple):
    """A diagnosis and its place, as far as they are known."""

    diagnosis: Diagnosis | None
    location: Location | None = None


@dataclass(slots=True)
class LevelResult:
    """A judged level: its entry in the verdict, the rows behind it, and the cause of its failure."""

    level: Level
    measurements: list[Measurement] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    judged: Sequence[Ratio] = ()
    """The ratios that decided."""
    first_bad: TokenPosition | None = None
    """The first token with a wrong value."""
    cause: Cause | DiagnosedFault | None = None
    """Diagnosis and place, if the level fails."""

    @property
    def is_failed(self) -> bool:
        """Return True for FAIL."""
        return self.level.verdict is Outcome.FAIL

    def with_rows(self, rows: Iterable[Measurement], notes: Iterable[str] = ()) -> "LevelResult":
        """Return the level with more rows of measurements.jsonl and notes of the verdict."""
        return replace(self, measurements=[*self.measurements, *rows], notes=[*self.notes, *notes])


def passed(compared: int, **facts: Any) -> LevelResult:  # noqa: ANN401 - of a level
    """Return a passed level. Without comparisons, it is not compared."""
    return LevelResult(level_of(compared, 0, facts))


def failed(
    compared: int,
    reason: str,
    diagnosis: Diagnosis | None = None,
    location: Location | None = None,
    **facts: Any,  # noqa: ANN401 - of a level
) -> LevelResult:
    """Return a failed level."""
    level = Level(verdict=Outcome.FAIL, reason=reason, compared=compared, **facts)
    return LevelResult(level, cause=Cause(diagnosis, location))


def not_compared(
    reason: str,
    compared: int = 0,
    **facts: Any,  # noqa: ANN401 - of a level
) -> LevelResult:
    """Return a level that could not be compared, or only in part."""
    level = Level(verdict=Outcome.NOT_COMPARED, reason=reason, compared=compared, **facts)
    return LevelResult(level)


def not_run(reason: str, **facts: Any) -> LevelResult:  # noqa: ANN401 - of a level
    """Return a level that was not requested, or that earlier levels left without input."""
    return LevelResult(Level(verdict=None, reason=reason, **facts))


def describe_uncalled(modules: Sequence[str]) -> str:
    """Describe modules of the reference that the candidate never calls."""
    is_one = len(modules) == 1
    return (
        f"the candidate does not call {len(modules)} module{'' if is_one else 's'} of the reference; compared"
        f" inside the module{'' if is_one else 's'} around {'it' if is_one else 'them'}: {name_some(modules)}"
    )


def level_of(num_compared: int, num_failed: int, facts: dict[str, Any]) -> Level:
    """Make a level's entry in a verdict, with `facts`. A level that compared nothing never passes."""
    if num_compared == 0:
        nothing = {"verdict": Outcome.NOT_COMPARED, "reason": "nothing was compared"}
        return Level(**(facts | nothing))
    outcome = Outcome.FAIL if num_failed else Outcome.PASS
    return Level(verdict=outcome, compared=num_compared, **facts)


def conclude(
    results: Mapping[str, LevelResult],
    cause: Cause | DiagnosedFault | None = None,
    *,
    notes: Iterable[str] = (),
    coverage: Coverage | None = None,
    different_weights: Sequence[str] = (),
    **fields: Any,  # noqa: ANN401 - of a verdict
) -> Verdict:
    """Make the verdict on all levels. No other function makes one.

    cause: provides diagnosis and place, if the outcome is FAIL.
    notes: all notes of the verdict.
    different_weights: parameters that are not the reference's, which a PASS notes.
    """
    levels = {name: one.level for name, one in results.items()}
    outcome = outcome_of_levels(levels, coverage)
    found = cause if outcome is Outcome.FAIL else None
    facts: dict[str, Any] = {
        "location": found.location if found else None,
        "diagnosis": found.diagnosis if found else None,
        "compared": sum(level.compared for level in levels.values()),
    }
    listed = list(notes)
    if outcome is Outcome.PASS and different_weights:
        facts["diagnosis"] = "below-resolution"
        names = name_some(different_weights)
        listed.append(f"weights differ from the reference's, and no output shows it: {names}")
    return Verdict(
        verdict=outcome, levels=levels, notes=listed, coverage=coverage, **(facts | fields)
    )


def rows_of(results: Mapping[str, LevelResult]) -> list[Measurement]:
    """Return the rows of all levels."""
    return [row for one in results.values() for row in one.measurements]


def notes_of(results: Mapping[str, LevelResult]) -> list[str]:
    """Return the notes of all levels."""
    return [note for one in results.values() for note in one.notes]


def outcome_of_levels(levels: Mapping[str, Level], coverage: Coverage | None = None) -> Outcome:
    """Combine the outcomes of levels and coverage into that of a verdict."""
    outcomes = [level.verdict for level in levels.values() if level.verdict]
    if outcomes and coverage is not None:
        outcomes.append(coverage.outcome)
    return overall_outcome(outcomes)


def find_worst(judged: Iterable[Item]) -> Item:
    """Return the ratio furthest over its limit, or nearest to it. Raises: ValueError without a ratio."""
    return max(judged, key=lambda item: item.severity)


def pool_resolutions(judged: Iterable[Ratio]) -> dict[str, float]:
    """Return the coarsest resolution of each statistic that has a limit above zero."""
    pooled: dict[str, float] = {}
    for item in judged:
        if item.limit:
            known = pooled.get(item.statistic, 0.0)
            pooled[item.statistic] = max(known, item.resolution)
    return pooled


def general_resolution(judged: Iterable[Ratio]) -> float | None:
    """Return the resolution for errors of any form. Systematic errors are seen far below it."""
    pooled = pool_resolutions(judged)
    return next((pooled[name] for name in GENERAL if name in pooled), None)


def find_reported(judged: Sequence[Item], deciding: Item | None) -> Item:
    """Return the verdict's deciding ratio if it belongs to this level, otherwise the worst."""
    return next((item for item in judged if item is deciding), None) or find_worst(judged)


def describe_judged_level(judged: Sequence[Ratio], deciding: Ratio | None = None) -> dict[str, Any]:
    """Return the reported ratio of a level and its resolutions, as facts for verdict.json."""
    if not judged:
        return {}
    reported = find_reported(judged, deciding)
    return {
        "statistic": reported.statistic,
        "noise_ratio": reported.value,
        "limit": reported.limit,
        "resolution": pool_resolutions(judged),
    }


class DecidingNumbers(TypedDict, total=False):
    """The fields of a verdict for its deciding ratio."""

    noise_ratio: float | None
    limit: float | None
    statistic: str | None
    resolution: float | None


# The numbers of a verdict about values that must be equal, or that rests on no measurement.
EXACT_NUMBERS: DecidingNumbers = {
    "noise_ratio": None,
    "limit": 0.0,
    "statistic": "exact",
    "resolution": 0.0,
}


def deciding_numbers(decided: Ratio, resolution: float | None) -> DecidingNumbers:
    """Return the numbers of the deciding ratio. resolution: of errors of any form."""
    return {
        "noise_ratio": decided.value,
        "limit": decided.limit,
        "statistic": decided.statistic,
        "resolution": resolution,
    }


def list_unmatched(expected: Sequence[str], actual: Sequence[str]) -> Unmatched:
    """Return the names without a partner, as far as a verdict lists them."""
    return Unmatched(expected=list(expected[:MOST_LISTED]), actual=list(actual[:MOST_LISTED]))
