"""Results of a comparison of weights."""

from dataclasses import dataclass, field, replace
from typing import Literal

Cause = Literal[
    "scale",  # a scale is `amount` times the right one
    "zero-point",  # a zero point is `amount` steps too large
    "swapped",  # the values belong to the group at `partner`
    "swapped-parameters",  # scale and zero point belong to the group at `partner`
    "values",  # none of these
    "shard",  # most weights of one file are other weights
]


@dataclass(frozen=True)
class Place:
    """Some rows and columns of a weight."""

    rows: range
    columns: tuple[int, ...]


@dataclass(frozen=True)
class Finding:
    """One fault: of a group, of a weight, or of a file."""

    weight: str
    """Name in EXPECTED; the file's name for a shard."""
    cause: Cause
    error: float
    """Relative error, ||actual - expected|| / ||expected||."""
    best: float
    """The relative error that the format can reach for these weights."""
    place: Place | None = None
    """None for all of the weight."""
    amount: float = 0.0
    """Factor or steps, as `cause` says; for a shard, the number of its weights that differ."""
    partner: Place | None = None

    @property
    def ratio(self) -> float:
        """The error as a multiple of the best one."""
        return self.error / self.best if self.best else (float("inf") if self.error else 0.0)


@dataclass(frozen=True)
class WeightResult:
    """One compared weight."""

    name: str
    """Name in EXPECTED."""
    file: str
    num_groups: int
    error: float
    """Median over the groups of the relative error."""
    best: float
    """Median over the groups of the best reachable error."""
    worst_ratio: float
    """Largest error of a group as a multiple of its best."""
    resolution: float = 0.0
    """The smallest relative error of one group's scale that would have been found, in the median group."""
    findings: tuple[Finding, ...] = ()
    """Worst first."""
    is_other: bool = False
    """Most of it differs."""
    is_rescaled: bool = False
    """Its rows or columns were scaled, and another weight of its block cancels that."""

    def rescaled(self) -> "WeightResult":
        """Return the result without findings, for a weight whose factors are explained."""
        return replace(self, findings=(), is_other=False, is_rescaled=True)


@dataclass(frozen=True)
class WeightComparison:
    """All weights of two folders."""

    results: tuple[WeightResult, ...]
    findings: tuple[Finding, ...]
    """Worst first; those of a stale shard are one."""
    unmatched_expected: tuple[str, ...] = ()
    unmatched_actual: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = field(default=())
    """Weights of other shapes, with the reason."""

    @property
    def num_groups(self) -> int:
        """Number of compared groups."""
        return sum(result.num_groups for result in self.results)
