"""Verdicts on training cycles, of cases and of users' commands.

A level is a function of a cycle that returns at the first rule that decides. A table of levels gives
their order in the verdict.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from assay.errors import name_alike
from assay.judge.levels import LevelResult, conclude, failed
from assay.verdicts import Diagnosis, Location, Measurement

if TYPE_CHECKING:
    from torch import Tensor

# Makes the verdict on all levels.
verdict_of = partial(conclude, compared_unit="losses, tensors and runs")


def relative_error(actual: "Tensor", expected: "Tensor") -> float:
    """Return the norm of the difference over the norm of `expected`, in float64."""
    wide = expected.double()
    return float((actual.double() - wide).norm() / wide.norm())


def failed_checkpoint(
    step: int,
    compared: int,
    reason: str,
    rows: Iterable[Measurement] = (),
    *,
    diagnosis: Diagnosis | None = None,
    parameter: str | None = None,
) -> LevelResult:
    """Return a level that failed for the checkpoint of `step` or the run that resumed from it."""
    location = Location(phase="checkpoint", step=step, parameter=parameter)
    return failed(compared, reason, diagnosis, location).with_rows(rows)


def failed_update(
    compared: int,
    names: Sequence[str],
    words: str,
    diagnosis: Diagnosis,
    **place: Any,  # noqa: ANN401 - fields of a location
) -> LevelResult:
    """Return a level that failed for the parameters `names`. words: follow their number."""
    location = Location(phase="optimizer", parameter=names[0], **place)
    return failed(compared, f"{len(names)} {words}: {name_alike(names)}", diagnosis, location)


def differing_keys(before: Mapping[str, object], after: Mapping[str, object]) -> set[str]:
    """Return the keys whose values differ, or that only one side has."""
    return {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
