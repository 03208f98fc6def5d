"""The judge of training cycles, of cases and of users' commands: rules that both share, and their verdict.

A level is a function of a cycle that returns at the first rule that decides. A table of levels gives
their order in the verdict.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """Return a failed level if a trained tensor did not move, or a frozen one did.

    before, after: hashes by name; trained, frozen: names, and the words that follow the number of the
        wrong ones; place: fields of the location by the first of them.
    """
    moved = differing_keys(before, after)
    still, unexpected = sorted(trained[0] - moved), sorted(frozen[0] & moved)
    if still:
        words = f"{trained[1]} never moved"
        return failed_update(len(after), still, words, "frozen-parameters", **place(still[0]))
    if unexpected:
        words = f"{frozen[1]} moved"
        return failed_update(
            len(after), unexpected, words, "optimizer-update", **place(unexpected[0])
        )
    return None


def differing_keys(before: Mapping[str, object], after: Mapping[str, object]) -> set[str]:
    """Return the keys whose values differ, or that only one side has."""
    return {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
