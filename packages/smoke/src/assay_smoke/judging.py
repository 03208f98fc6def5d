"""The judge of training cycles, of cases and of users' commands: rules that both share, and their verdict.

A level is a function of a cycle that returns at the first rule that decides. A table of levels gives
their order in the verdict.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.errors import name_alike
from assay.judge.levels import Cause, DiagnosedFault, LevelResult, conclude, failed, rows_of
from assay.runs.results import write_results
from assay.verdicts import Diagnosis, Location, Measurement, Verdict

if TYPE_CHECKING:
    from torch import Tensor


def write_verdict(
    found: Mapping[str, LevelResult],
    folder: Path,
    cause: Cause | DiagnosedFault | None = None,
    more_rows: Iterable[Measurement] = (),
    **fields: Any,  # noqa: ANN401 - of a verdict
) -> Verdict:
    """Write the verdict on all levels and their rows into `folder`, with `more_rows` for display."""
    verdict = conclude(found, cause, compared_unit="losses, tensors and runs", **fields)
    return write_results(verdict, [*rows_of(found), *more_rows], folder)


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


def find_wrong_movement(
    before: Mapping[str, str],
    after: Mapping[str, str],
    trained: tuple[set[str], str],
    frozen: tuple[set[str], str],
    place: Callable[[str], dict[str, Any]],
) -> LevelResult | None:
    """Return a failed level if a trained tensor did not move, or a frozen one did. Its reason names both.

    before, after: hashes by name; trained, frozen: names, and the words that follow the number of the
        wrong ones; place: fields of the location by the first of them.
    """
    moved = differing_keys(before, after)
    wrong: list[tuple[set[str], str, Diagnosis]] = [
        (trained[0] - moved, f"{trained[1]} never moved", "frozen-parameters"),
        (frozen[0] & moved, f"{frozen[1]} moved", "optimizer-update"),
    ]
    found = [
        failed_update(len(after), sorted(names), words, diagnosis, **place(min(names)))
        for names, words, diagnosis in wrong
        if names
    ]
    if not found:
        return None
    reason = "; ".join(str(one.level.reason) for one in found)
    return replace(found[0], level=found[0].level.model_copy(update={"reason": reason}))


def differing_keys(before: Mapping[str, object], after: Mapping[str, object]) -> set[str]:
    """Return the keys whose values differ, or that only one side has."""
    return {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
