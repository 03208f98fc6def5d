"""Levels, findings and deciding numbers of a verdict, from judged ratios. Imports no torch."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from assay.errors import name_some
from assay.sites import Phase
from assay.verdicts import (
    Coverage,
    Diagnosis,
    Level,
    Location,
    Measurement,
    Outcome,
    Suspect,
    TokenPosition,
    Unmatched,
    overall_outcome,
)

if TYPE_CHECKING:
    from assay.noise import Ratio

# The level of each phase of a training step.
LEVEL_OF_PHASE: dict[Phase, str] = {
    "inputs": "inputs", "forward": "activations", "backward": "gradients", "reduce": "gradients",
    "clip": "gradients", "optimizer": "updates", "checkpoint": "checkpoint", "sampler": "sampler",
}  # fmt: skip

# Largest number of names or suspects in a verdict; the measurements hold all.
MOST_LISTED = 50


@dataclass(frozen=True, slots=True)
class JudgedRatio:
    """The ratio of one statistic, with its limit."""

    ratio: "Ratio"
    limit: float

    @property
    def severity(self) -> float:
        """Return ratio / limit; inf for unequal values that must be equal."""
        value = self.ratio.value
        if self.limit == 0:
            return math.inf if value > 0 else 0.0
        return value / self.limit

    @property
    def failed(self) -> bool:
        """Return True if the ratio is over the limit."""
        return self.severity > 1

    @property
    def resolution(self) -> float:
        """Return the smallest relative error that would have failed here."""
        return self.limit * self.ratio.expected

    def measurement(self, level: str, port: str, module: str = "", **place: Any) -> Measurement:  # noqa: ANN401
        """Make the row of measurements.jsonl. place: more columns that locate it."""
        return Measurement(
            level=level, module=module, port=port, statistic=self.ratio.statistic,
            actual=self.ratio.actual, expected=self.ratio.expected, ratio=self.ratio.value,
            limit=self.limit, **place,
        )  # fmt: skip

    def suspect(self, location: Location) -> Suspect:
        """Make the entry of a verdict's suspects."""
        return Suspect(
            location=location,
            statistic=self.ratio.statistic,
            error=self.ratio.actual,
            noise_ratio=self.ratio.value,
            limit=self.limit,
        )


Item = TypeVar("Item", bound=JudgedRatio)


@dataclass(slots=True)
class LevelResult:
    """A judged level: its entry in the verdict, and the rows behind it."""

    level: Level
    measurements: list[Measurement] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    judged: Sequence[JudgedRatio] = ()
    """The ratios that decided."""
    first_bad: TokenPosition | None = None
    """The first token with a wrong value."""

    @classmethod
    def not_run(cls, reason: str) -> "LevelResult":
        """Make the result of a level that was not run."""
        return cls(Level(verdict=None, reason=reason))


@dataclass(frozen=True, slots=True)
class DiagnosedFault:
    """A diagnosis and its place."""

    diagnosis: Diagnosis
    location: Location
    reason: str | None = None
    """The cause in words, if no ratio shows it."""


def describe_uncalled(modules: Sequence[str]) -> str:
    """Describe modules of the reference that the candidate never calls."""
    return (
        f"{len(modules)} modules of the reference are not called here; the modules that contain"
        f" them are compared instead: {name_some(modules)}"
    )


def level_of(num_compared: int, num_failed: int, facts: Mapping[str, Any]) -> Level:
    """Make a level's entry in a verdict, with `facts`. A level that compared nothing never passes."""
    if num_compared == 0:
        return Level(verdict=Outcome.NOT_COMPARED, reason="nothing was compared", **facts)
    outcome = Outcome.FAIL if num_failed else Outcome.PASS
    return Level(verdict=outcome, compared=num_compared, **facts)


def outcome_of_levels(levels: Mapping[str, Level], coverage: Coverage | None = None) -> Outcome:
    """Combine the outcomes of levels and coverage into that of a verdict."""
    outcomes = [level.verdict for level in levels.values() if level.verdict]
    if outcomes and coverage is not None:
        outcomes.append(coverage.outcome)
    return overall_outcome(outcomes)


def find_worst(judged: Iterable[Item]) -> Item:
    """Return the ratio furthest over its limit, or nearest to it. Raises: ValueError without a ratio."""
    return max(judged, key=lambda item: item.severity)


def pool_resolutions(judged: Iterable[JudgedRatio]) -> dict[str, float]:
    """Return the coarsest resolution of each statistic that has a limit above zero."""
    pooled: dict[str, float] = {}
    for item in judged:
        if item.limit:
            known = pooled.get(item.ratio.statistic, 0.0)
            pooled[item.ratio.statistic] = max(known, item.resolution)
    return pooled


def find_reported(judged: Sequence[Item], deciding: Item | None) -> Item:
    """Return the verdict's deciding ratio if it belongs to this level, otherwise the worst."""
    return next((item for item in judged if item is deciding), None) or find_worst(judged)


def describe_judged_level(
    judged: Sequence[JudgedRatio], deciding: JudgedRatio | None = None
) -> dict[str, Any]:
    """Return the reported ratio of a level and its resolutions, as facts for verdict.json."""
    if not judged:
        return {}
    reported = find_reported(judged, deciding)
    return {
        "statistic": reported.ratio.statistic,
        "noise_ratio": reported.ratio.value,
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


def deciding_numbers(decided: JudgedRatio, resolution: float | None) -> DecidingNumbers:
    """Return the numbers of the deciding ratio. resolution: the smallest error that the run sees."""
    return {
        "noise_ratio": decided.ratio.value,
        "limit": decided.limit,
        "statistic": decided.ratio.statistic,
        "resolution": resolution,
    }


def list_unmatched(expected: Sequence[str], actual: Sequence[str]) -> Unmatched:
    """Return the names without a partner, as far as a verdict lists them."""
    return Unmatched(expected=list(expected[:MOST_LISTED]), actual=list(actual[:MOST_LISTED]))


def note_on_weights(names: Sequence[str]) -> str:
    """Describe parameters of a passed run that differ from the reference's."""
    return f"weights differ from the reference's, within the limits: {name_some(names)}"
