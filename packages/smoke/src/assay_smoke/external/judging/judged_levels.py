"""Judged levels of the verdict on a training library."""

from dataclasses import dataclass
from typing import Any

from assay.verdicts import Diagnosis, Level, Location, Outcome


@dataclass(frozen=True, slots=True)
class JudgedLevel:
    """A judged level, with the diagnosis and place of its failure if they are known."""

    level: Level
    diagnosis: Diagnosis | None = None
    location: Location | None = None

    @property
    def failed(self) -> bool:
        """Return whether the level failed."""
        return self.level.verdict is Outcome.FAIL


def passed(compared: int, **facts: Any) -> JudgedLevel:  # noqa: ANN401 - of a level
    """Return a passed level. Without comparisons, it is not compared."""
    if not compared:
        return not_compared("nothing was compared")
    return JudgedLevel(Level(verdict=Outcome.PASS, compared=compared, **facts))


def failed(
    compared: int,
    reason: str,
    diagnosis: Diagnosis | None = None,
    location: Location | None = None,
) -> JudgedLevel:
    """Return a failed level."""
    level = Level(verdict=Outcome.FAIL, reason=reason, compared=compared)
    return JudgedLevel(level, diagnosis, location)


def failed_checkpoint(step: int, compared: int, reason: str) -> JudgedLevel:
    """Return a level that failed for the checkpoint of `step` or for the run that resumed from it."""
    return failed(compared, reason, "checkpoint-mismatch", Location(phase="checkpoint", step=step))


def not_compared(reason: str) -> JudgedLevel:
    """Return a level that could not be compared."""
    return JudgedLevel(Level(verdict=Outcome.NOT_COMPARED, reason=reason))


def not_run(reason: str, **facts: Any) -> JudgedLevel:  # noqa: ANN401 - of a level
    """Return a level that was not requested, or that earlier levels left without input."""
    return JudgedLevel(Level(verdict=None, reason=reason, **facts))
