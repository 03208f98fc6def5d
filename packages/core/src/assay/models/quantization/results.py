"""Results of a weight comparison."""

from dataclasses import dataclass, field
from typing import Literal

Cause = Literal[
    "scale",  # a scale is `amount` times the right one
    "zero-point",  # a zero point is `amount` steps too large
    "swapped",  # the values belong to the group at `partner`
    "swapped-parameters",  # scale and zero point belong to the group at `partner`
    "values",  # none of these
    "shard",  # most weights of one file belong to another model
]


@dataclass(frozen=True)
class WeightRegion:
    """Rows and columns of a weight."""

    rows: range
    columns: tuple[int, ...]


@dataclass(frozen=True)
class WeightFault:
    """One fault of a group, a weight or a file."""

    weight: str
    """Name in EXPECTED; the file's name for a shard."""
    cause: Cause
    error: float
    """Relative error, ||actual - expected|| / ||expected||."""
    best: float
    """Best relative error of the format for these weights."""
    place: WeightRegion | None = None
    """None for the whole weight."""
    amount: float = 0.0
    """Factor or steps, depending on `cause`; for a shard, the number of its wrong weights."""
    partner: WeightRegion | None = None

    @property
    def ratio(self) -> float:
        """Divide the error by the best error."""
        return self.error / self.best if self.best else (float("inf") if self.error else 0.0)


@dataclass(frozen=True)
class WeightResult:
    """One compared weight."""

    name: str
    """Name in EXPECTED."""
    file: str
    num_groups: int
    error: float
    """Median relative error of the groups."""
    best: float
    """Median best error of the groups."""
    worst_ratio: float
    """Largest ratio of a group's error to its best error."""
    resolution: float = 0.0
    """Relative error from which on a wrong scale is found, in 95 % of the groups."""
    findings: tuple[WeightFault, ...] = ()
    """Worst first."""
    is_other: bool = False
    """Most of it differs."""
    is_rescaled: bool = False
    """Its rows or columns were scaled, and another weight of its layer cancels that."""


@dataclass(frozen=True)
class WeightComparison:
    """All weights of two folders."""

    results: tuple[WeightResult, ...]
    findings: tuple[WeightFault, ...]
    """Worst first. The faults of a stale shard are merged."""
    unmatched_expected: tuple[str, ...] = ()
    unmatched_actual: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = field(default=())
    """Weights with different shapes, with the reason."""

    @property
    def num_groups(self) -> int:
        """Count the compared groups."""
        return sum(result.num_groups for result in self.results)
