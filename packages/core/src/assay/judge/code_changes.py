"""Changes of a model's code since a golden: exact values that this environment computes otherwise."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from assay.errors import name_some
from assay.judge.results import PortResult, ReplayResults

# Places that a description names.
_SHOWN = 4


class CodeChange(NamedTuple):
    """A stage whose yardstick has other values here."""

    stage: str
    port: str
    error: float
    """Relative to the golden's value; 1 for a value that one side lacks, or that must be equal."""


def find_changes(results: ReplayResults, rounding: float) -> list[CodeChange]:
    """Return the values that differ by more than `rounding`, or that one side lacks."""
    absent = [CodeChange(name, "", 1.0) for name in results.unmatched_expected]
    errors = ((one, _error_of(one)) for one in results.ports.values())
    wrong = [
        CodeChange(str(one.stage), f"{one.module or '(model)'}:{one.port}", error)
        for one, error in sorted(errors, key=lambda pair: pair[0].order)
        if not error <= rounding
    ]
    return [*absent, *wrong]


def _error_of(one: PortResult) -> float:
    if one.exact.num_different or one.sums.num_nan or one.sums.num_inf:
        return 1.0
    if not one.sums.num_elements:
        return 0.0
    error = max(one.sums.relative_error, one.sums.worst_row()[0])
    return error if math.isfinite(error) else 1.0


def describe_changes(changes: Sequence[CodeChange]) -> str:
    """Name the stages of code changes, each with its largest error."""
    stages: dict[str, float] = {}
    for one in changes:
        stages[one.stage] = max(stages.get(one.stage, 0.0), one.error)
    return name_some([f"{stage} by {error:.2g}" for stage, error in stages.items()], _SHOWN)
