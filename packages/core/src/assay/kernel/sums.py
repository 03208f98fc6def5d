"""The sums over a pair of tensors, and their settings, which the compiled sums and those in torch share."""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import lru_cache
from statistics import NormalDist
from typing import Any, Literal

import torch
from torch import Tensor

# Bins of the expected value, in units of its root mean square. Their edges are the quantiles n/24 of a normal
# distribution, and tails, where saturating functions (softcaps, activations) act. Edges are multiples of a cell,
# so that a table gives the bin of a value. A search takes ten times as long.
CELLS_PER_UNIT = 64
REACH = 9 * CELLS_PER_UNIT
_CENTRE = [NormalDist().inv_cdf(n / 24) for n in range(1, 24)]
_TAIL = [2.5, 3.5, 5.0, 8.0]
BIN_EDGES = tuple(
    round(edge * CELLS_PER_UNIT) / CELLS_PER_UNIT
    for edge in [*(-edge for edge in reversed(_TAIL)), *_CENTRE, *_TAIL]
)
NUM_BINS = len(BIN_EDGES) + 1
# Not by torch.bucketize: the fork server imports this file before it forks, and the child of a
# process with OpenMP threads waits for them forever.
BINS = torch.tensor(
    [bisect_left(BIN_EDGES, (cell - REACH) / CELLS_PER_UNIT) for cell in range(2 * REACH + 1)],
    dtype=torch.int32,
)


def bin_of(values: Tensor, unit: float) -> Tensor:
    """Return the bin of each value, int32; values are finite, `unit` is their root mean square."""
    cell = (values * (CELLS_PER_UNIT / unit)).ceil_().clamp_(-REACH, REACH)
    return BINS.index_select(0, cell.add_(REACH).int())


# "norms": no sums of channels, bins and slopes. "pointwise": also what is rounded otherwise.
Extent = Literal["norms", "all", "pointwise"]

NUM_CHANNEL_SUMS = 5

# Bins use this many elements of each call, but at least one of LARGEST_STRIDE: one call may hold a
# whole text or one token.
BINNED_ELEMENTS = 1 << 14
LARGEST_STRIDE = 9

# Fewer elements give a slope of a row that is mostly chance.
FEWEST_IN_ROW = 16

# Smallest norm of a row, as a share of the root mean square row norm: otherwise the rounding of a
# nearly zero row is a large relative error.
ROW_FLOOR = 0.1

# Larger than any activation. Masks contain the lowest number of their dtype. The difference between
# those of two dtypes would exceed all other errors.
MASKED_SIZE = 2.0**120


@lru_cache(maxsize=64)
def factors(size: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Return standard normal numbers in the precision of `dtype`, (size,) float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).double()


@dataclass(frozen=True, slots=True)
class WorstElement:
    """The element with the largest absolute error."""

    difference: float = -1.0
    actual: float = math.nan
    expected: float = math.nan
    index: tuple[int, ...] = ()


def _sum_of(summand: Callable[[Tensor, Tensor], Tensor]) -> Any:  # noqa: ANN401 - a field
    return field(default=0.0, metadata={"summand": summand})


@dataclass(slots=True)
class PooledSums:
    """Sums and counts over the finite elements of pairs, which calls add up; d = actual - expected, e = expected.

    `pairs.c` lists the same names in the same order. The sums are saved: another one makes older goldens invalid.
    """

    ee: float = _sum_of(lambda d, e: e * e)  # noqa: ARG005 - all have both
    dd: float = _sum_of(lambda d, e: d * d)  # noqa: ARG005
    de: float = _sum_of(lambda d, e: d * e)
    dede: float = _sum_of(lambda d, e: (d * e) * (d * e))
    """The variance of `de` under independent errors."""
    num_nan: int = 0
    """Number of actual NaN values where the expected value is finite."""
    num_inf: int = 0
    num_misrounded: int = 0
    """Number of actual values that are not the expected one, rounded; 0 unless the extent is "pointwise"."""

    def pool(self, other: "PooledSums") -> None:
        """Add the sums and counts of another call."""
        for name in POOLED:
            setattr(self, name, getattr(self, name) + getattr(other, name))


POOLED = tuple(item.name for item in fields(PooledSums))
SUMMANDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    item.name: item.metadata["summand"] for item in fields(PooledSums) if item.metadata
}
COUNTS = tuple(name for name in POOLED if name not in SUMMANDS)


@dataclass(slots=True, kw_only=True)
class CallSums(PooledSums):
    """The sums of one pair."""

    rows: Tensor
    """(3, R): norms of e and of d, and the root mean square norm of e. The norm of d is nan in a row in which
    a value is not finite on one side, or another one on the other."""
    channels: Tensor
    """(5, C): sums over the rows of d, d e, e e, d d, e; zeros if the extent is "norms"."""
    bins: Tensor
    """(6, K): count, sums of d, d d and e by bin of e, over the root mean square of e; if the extent is
    "pointwise" also sums of d and d d for d = actual - rounded e; zeros if it is "norms"."""
    row_slopes: Tensor
    """(4,): number of rows that are long and large enough; sums of their slopes, squared slopes and variances."""
    worst: WorstElement = field(default_factory=WorstElement)


@dataclass(frozen=True, slots=True)
class TokenSums:
    """Sums over the vocabulary, each (T,) in float64; P is the softmax of e, E[x] the mean of x under P."""

    d: Tensor
    dd: Tensor
    ee: Tensor
    de: Tensor
    e: Tensor
    low: Tensor
    """The lowest d."""
    high: Tensor
    spread: Tensor
    """Sum of the squares of d over its mean."""
    mean: Tensor
    """E[d]."""
    rest: Tensor
    """E[c] for c = d - E[d]: the rounding of `mean`."""
    excess: Tensor
    """E[e**c - 1 - c]; nan where a c is larger than 4, for which its series has too many terms."""
