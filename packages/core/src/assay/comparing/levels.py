"""What every kind of check makes of judged ratios: levels, findings, the numbers of a verdict.

Importing it imports no torch.
"""

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

# Names and suspects that a verdict lists; the rest is in the measurements.
MOST_LISTED = 50


@dataclass(frozen=True, slots=True)
class JudgedRatio:
    """One statistic beside its limit."""

    ratio: "Ratio"
    limit: float

    @property
    def severity(self) -> float:
        """How many times over its limit; inf for what must be exact and is not."""
        value = self.ratio.value
        if self.limit == 0:
            return math.inf if value > 0 else 0.0
        return value / self.limit

    @property
    def failed(self) -> bool:
        """Whether the ratio is over the limit."""
        return self.severity > 1

    @property
    def resolution(self) -> float:
        """The smallest relative error that would have failed here."""
        return self.limit * self.ratio.expected

    def measurement(self, level: str, port: str) -> Measurement:
        """The row of measurements.jsonl, for a ratio that belongs to no single module."""
        return Measurement(
            level=level, module="", port=port, statistic=self.ratio.statistic,
            actual=self.ratio.actual, expected=self.ratio.expected, ratio=self.ratio.value,
            limit=self.limit,
        )  # fmt: skip


Item = TypeVar("Item", bound=JudgedRatio)


@dataclass(slots=True)
class LevelResult:
    """A judged level: its entry in the verdict, and the rows behind it.

    judged: the ratios that decided it. first_bad: the first token with a wrong value.
    """

    level: Level
    measurements: list[Measurement] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    judged: Sequence[JudgedRatio] = ()
    first_bad: TokenPosition | None = None

    @classmethod
    def not_run(cls, reason: str) -> "LevelResult":
        """A level that was not run."""
        return cls(Level(verdict=None, reason=reason))


@dataclass(frozen=True, slots=True)
class Finding:
    """A diagnosis and the place that it names; `reason`: in words, where no ratio shows it."""

    diagnosis: Diagnosis
    location: Location
    reason: str | None = None


def describe_replaced(modules: Sequence[str]) -> str:
    """The note on modules of the reference that the candidate never calls."""
    return (
        f"{len(modules)} modules of the reference are not called here; the modules that contain"
        f" them are compared instead: {name_some(modules)}"
    )


def level_of(num_compared: int, num_failed: int, facts: Mapping[str, Any]) -> Level:
    """One level's entry in a verdict, with `facts`: nothing compared is never a pass."""
    if num_compared == 0:
        return Level(verdict=Outcome.NOT_COMPARED, reason="nothing was compared", **facts)
    outcome = Outcome.FAIL if num_failed else Outcome.PASS
    return Level(verdict=outcome, compared=num_compared, **facts)


def outcome_of_levels(levels: Mapping[str, Level], coverage: Coverage | None = None) -> Outcome:
    """Return the outcome of a verdict from its levels and their coverage."""
    outcomes = [level.verdict for level in levels.values() if level.verdict]
    if outcomes and coverage is not None:
        outcomes.append(coverage.outcome)
    return overall_outcome(outcomes)


def find_worst(judged: Iterable[Item]) -> Item:
    """The ratio that is furthest over its limit, or the one nearest to its limit. Raises: ValueError if none."""
    return max(judged, key=lambda item: item.severity)


def pool_resolutions(judged: Iterable[JudgedRatio]) -> dict[str, float]:
    """The coarsest resolution of each statistic that has a limit of noise."""
    pooled: dict[str, float] = {}
    for item in judged:
        if item.limit:
            known = pooled.get(item.ratio.statistic, 0.0)
            pooled[item.ratio.statistic] = max(known, item.resolution)
    return pooled


def find_reported(judged: Sequence[Item], deciding: Item | None) -> Item:
    """Return the ratio that a level is reported by: the verdict's own, if it is here, else the worst."""
    return next((item for item in judged if item is deciding), None) or find_worst(judged)


def describe_judged_level(
    judged: Sequence[JudgedRatio], deciding: JudgedRatio | None = None
) -> dict[str, Any]:
    """Facts of a level's entry in verdict.json: the ratio that reports it, and the resolutions."""
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
    """The fields of a verdict for the ratio that decided it."""

    noise_ratio: float | None
    limit: float | None
    statistic: str | None
    resolution: float | None


# Of what must be bitwise equal, or is known without any measurement.
EXACT_NUMBERS: DecidingNumbers = {
    "noise_ratio": None,
    "limit": 0.0,
    "statistic": "exact",
    "resolution": 0.0,
}


def deciding_numbers(decided: JudgedRatio, resolution: float | None) -> DecidingNumbers:
    """The numbers of the ratio that decided; `resolution`: what the run could not have seen."""
    return {
        "noise_ratio": decided.ratio.value,
        "limit": decided.limit,
        "statistic": decided.ratio.statistic,
        "resolution": resolution,
    }


def list_unmatched(expected: Sequence[str], actual: Sequence[str]) -> Unmatched:
    """What found no partner, as far as a verdict lists it."""
    return Unmatched(expected=list(expected[:MOST_LISTED]), actual=list(actual[:MOST_LISTED]))


def note_on_weights(names: Sequence[str]) -> str:
    """What a passed verdict notes of parameters that are not the reference's."""
    return f"weights differ from the reference's, within the limits: {name_some(names)}"
