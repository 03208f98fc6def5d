"""Judged levels of a training cycle, and the verdict on all of them.

A level is a function of the evidence that returns at the first rule that decides. The table of levels
gives their order in the verdict.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Self

from assay.comparing.levels import DiagnosedFault, LevelResult, level_of, outcome_of_levels
from assay.verdicts import Diagnosis, Level, Location, Measurement, Outcome, Verdict
from assay_smoke import COMPARED_UNIT


class Found(NamedTuple):
    """A judged level, with the diagnosis and place of its failure if they are known."""

    result: LevelResult
    diagnosis: Diagnosis | None = None
    location: Location | None = None

    @property
    def level(self) -> Level:
        """Return the entry of the verdict."""
        return self.result.level

    @classmethod
    def of(cls, result: LevelResult, fault: DiagnosedFault | None) -> Self:
        """Take the result of a judge of core."""
        return cls(result) if fault is None else cls(result, fault.diagnosis, fault.location)

    def with_rows(self, rows: Iterable[Measurement], notes: Iterable[str] = ()) -> Self:
        """Add rows of measurements.jsonl and notes of the verdict."""
        self.result.measurements.extend(rows)
        self.result.notes.extend(notes)
        return self


def passed(compared: int, **facts: Any) -> Found:  # noqa: ANN401 - of a level
    """Return a passed level. Without comparisons, it is not compared."""
    return Found(LevelResult(level_of(compared, 0, facts)))


def failed(
    compared: int,
    reason: str,
    diagnosis: Diagnosis | None = None,
    location: Location | None = None,
) -> Found:
    """Return a failed level."""
    level = Level(verdict=Outcome.FAIL, reason=reason, compared=compared)
    return Found(LevelResult(level), diagnosis, location)


def not_compared(reason: str) -> Found:
    """Return a level that could not be compared."""
    return Found(LevelResult(Level(verdict=Outcome.NOT_COMPARED, reason=reason)))


def not_run(reason: str, **facts: Any) -> Found:  # noqa: ANN401 - of a level
    """Return a level that was not requested, or that earlier levels left without input."""
    return Found(LevelResult(Level(verdict=None, reason=reason, **facts)))


def verdict_of(
    found: Mapping[str, Found],
    cause: Found | None = None,
    **facts: Any,  # noqa: ANN401 - fields of a verdict
) -> Verdict:
    """Make the verdict on all levels. cause: the level that provides diagnosis and place."""
    levels = {name: one.level for name, one in found.items()}
    return Verdict(
        verdict=outcome_of_levels(levels),
        levels=levels,
        location=cause.location if cause else None,
        diagnosis=cause.diagnosis if cause else None,
        compared=sum(level.compared for level in levels.values()),
        compared_unit=COMPARED_UNIT,
        **facts,
    )


def failed_checkpoint(
    step: int,
    compared: int,
    reason: str,
    *,
    diagnosis: Diagnosis = "checkpoint-mismatch",
    parameter: str | None = None,
) -> Found:
    """Return a level that failed for the checkpoint of `step` or the run that resumed from it."""
    location = Location(phase="checkpoint", step=step, parameter=parameter)
    return failed(compared, reason, diagnosis, location)
