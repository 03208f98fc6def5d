"""One level of the verdict on a training library, as it was judged."""

from dataclasses import dataclass
from typing import Any

from assay.verdicts import Diagnosis, Level, Location, Outcome


@dataclass(frozen=True, slots=True)
class JudgedLevel:
    """A level, and what its failure says of the cause; None where no diagnosis or place fits."""

    level: Level
    diagnosis: Diagnosis | None = None
    location: Location | None = None

    @property
    def failed(self) -> bool:
        """Whether the level failed."""
        return self.level.verdict is Outcome.FAIL


def passed(compared: int, **facts: Any) -> JudgedLevel:  # noqa: ANN401 - of a level
    """All `compared` are as they should be; none is no pass."""
    if not compared:
        return not_compared("nothing was compared")
    return JudgedLevel(Level(verdict=Outcome.PASS, compared=compared, **facts))


def failed(
    compared: int,
    reason: str,
    diagnosis: Diagnosis | None = None,
    location: Location | None = None,
) -> JudgedLevel:
    """Something of what was compared is wrong, as `reason` says."""
    level = Level(verdict=Outcome.FAIL, reason=reason, compared=compared)
    return JudgedLevel(level, diagnosis, location)


def failed_checkpoint(step: int, compared: int, reason: str) -> JudgedLevel:
    """The checkpoint of `step`, or what went on from it, is wrong."""
    return failed(compared, reason, "checkpoint-mismatch", Location(phase="checkpoint", step=step))


def not_compared(reason: str) -> JudgedLevel:
    """What should have been compared could not be."""
    return JudgedLevel(Level(verdict=Outcome.NOT_COMPARED, reason=reason))


def not_run(reason: str, **facts: Any) -> JudgedLevel:  # noqa: ANN401 - of a level
    """A level that was not asked for, or for which a level before it left nothing."""
    return JudgedLevel(Level(verdict=None, reason=reason, **facts))
