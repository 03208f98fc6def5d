"""Verdicts on training cycles.

A level is a function of the evidence that returns at the first rule that decides. The table of levels
gives their order in the verdict.
"""

from collections.abc import Mapping
from typing import Any

from assay.comparing.levels import Cause, DiagnosedFault, LevelResult, conclude, failed
from assay.verdicts import Diagnosis, Location, Verdict
from assay_smoke import COMPARED_UNIT


def verdict_of(
    found: Mapping[str, LevelResult],
    cause: Cause | DiagnosedFault | None = None,
    **facts: Any,  # noqa: ANN401 - fields of a verdict
) -> Verdict:
    """Make the verdict on all levels."""
    return conclude(found, cause, compared_unit=COMPARED_UNIT, **facts)


def failed_checkpoint(
    step: int,
    compared: int,
    reason: str,
    *,
    diagnosis: Diagnosis = "checkpoint-mismatch",
    parameter: str | None = None,
) -> LevelResult:
    """Return a level that failed for the checkpoint of `step` or the run that resumed from it."""
    location = Location(phase="checkpoint", step=step, parameter=parameter)
    return failed(compared, reason, diagnosis, location)
