"""Judged levels of the verdict on a training library."""

from dataclasses import dataclass
from typing import Any, Self

from assay.comparing.levels import level_of
from assay.verdicts import Diagnosis, Level, Location, Outcome


@dataclass(frozen=True, slots=True)
class JudgedLevel:
    """A judged level, with the diagnosis and place of its failure if they are known."""

    level: Level
    diagnosis: Diagnosis | None = None
    location: Location | None = None

    @classmethod
    def passed(cls, compared: int, **facts: Any) -> Self:  # noqa: ANN401 - of a level
        """Return a passed level. Without comparisons, it is not compared."""
        return cls(level_of(compared, 0, facts))

    @classmethod
    def failed(
        cls,
        compared: int,
        reason: str,
        diagnosis: Diagnosis | None = None,
        location: Location | None = None,
    ) -> Self:
        """Return a failed level."""
        level = Level(verdict=Outcome.FAIL, reason=reason, compared=compared)
        return cls(level, diagnosis, location)

    @classmethod
    def failed_checkpoint(cls, step: int, compared: int, reason: str) -> Self:
        """Return a level that failed for the checkpoint of `step` or the run that resumed from it."""
        location = Location(phase="checkpoint", step=step)
        return cls.failed(compared, reason, "checkpoint-mismatch", location)

    @classmethod
    def not_compared(cls, reason: str) -> Self:
        """Return a level that could not be compared."""
        return cls(Level(verdict=Outcome.NOT_COMPARED, reason=reason))

    @classmethod
    def not_run(cls, reason: str, **facts: Any) -> Self:  # noqa: ANN401 - of a level
        """Return a level that was not requested, or that earlier levels left without input."""
        return cls(Level(verdict=None, reason=reason, **facts))
