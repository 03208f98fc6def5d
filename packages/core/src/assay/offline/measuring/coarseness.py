"""Values that lie on a coarser grid than they should: the mark of quantization."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from assay.offline.measuring.pairs import TensorPair
from assay.offline.ports.lanes import Port

# Of a tensor, so many rows are looked at, and so many values of each.
_NUM_ROWS, _WIDTH = 32, 64
_LEAST_WIDTH = 32
# Of 64 normal values, rounding to 8 bits leaves 0.82 distinct (the largest value at 2.5 deviations),
# fp8 0.6 and 4 bits 0.25. Both sides are first rounded to the coarser dtype of the two.
_MOST_DISTINCT = 0.9
# With fewer on both sides, the dtype is coarse for these values.
_FEWEST_DISTINCT = 0.5
# Relative error of values that were rounded to 3 bits: 0.2. More is no quantization.
_MOST_ERROR = 0.3
# Rounding to 8 bits, relative to the largest value: smaller differences are no quantization.
_LEAST_DIFFERENCE = 2.0**-10


@dataclass(frozen=True, slots=True)
class Coarseness:
    """The part of the values of a row that are distinct."""

    actual: float
    expected: float

    @property
    def side(self) -> str:
        """Return the side whose values lie on a grid; "" if none do, or both."""
        if max(self.actual, self.expected) < _FEWEST_DISTINCT:
            return ""
        if self.actual <= _MOST_DISTINCT * self.expected:
            return "ACTUAL"
        return "EXPECTED" if self.expected <= _MOST_DISTINCT * self.actual else ""


@dataclass(frozen=True, slots=True)
class CoarsenessObserver:
    """Collects the weights and results that lie on a coarser grid on one side."""

    coarse: dict[Port, Coarseness] = field(default_factory=dict)

    def __call__(self, pair: TensorPair) -> None:
        """Look at one pair."""
        port = pair.port
        if port.direction in ("output", "parameter") and pair.values and port not in self.coarse:
            # What was measured may have been widened since it was read.
            stored = [getattr(torch, one.dtype, None) for one in (pair.actual, pair.expected)]
            found = measure_coarseness(*pair.values, [one for one in stored if one is not None])
            if found is not None and found.side:
                self.coarse[port] = found

    def renew(self) -> "CoarsenessObserver":
        """Return one that has seen no pair."""
        return CoarsenessObserver()

    def extend(self, later: "CoarsenessObserver") -> None:
        """Add what one of later pairs has collected."""
        self.coarse.update(later.coarse)


def measure_coarseness(
    value: Tensor, reference: Tensor, stored: Sequence[torch.dtype] = ()
) -> Coarseness | None:
    """Count distinct values of two tensors, (R, C). Zeros count as neither: they have other reasons.

    stored: their dtypes in the dumps.
    Returns: None if they agree, differ by more than any quantization, or are too narrow.
    """
    dtypes = (value.dtype, reference.dtype, *stored)
    dtype = min(dtypes, key=lambda one: (one.itemsize, str(one)))
    is_wide = value.ndim == 2 and value.shape[-1] >= _LEAST_WIDTH and len(value) > 0
    if not (dtype.is_floating_point and is_wide):
        return None
    step = max(1, len(value) // _NUM_ROWS)
    actual, expected = (
        one[::step][:_NUM_ROWS, :_WIDTH].to(dtype).double() for one in (value, reference)
    )
    error = actual - expected
    is_close = torch.linalg.vector_norm(error) <= _MOST_ERROR * torch.linalg.vector_norm(expected)
    if not bool(is_close & (error.abs().amax() > _LEAST_DIFFERENCE * expected.abs().amax())):
        return None
    return Coarseness(_distinct_part(actual), _distinct_part(expected))


def _distinct_part(rows: Tensor) -> float:
    """Return the number of distinct values of rows over the number of values, zeros left out."""
    count = int(rows.count_nonzero())
    is_new = torch.ones_like(rows, dtype=torch.bool)
    ordered = rows.sort(-1).values
    is_new[:, 1:] = ordered.diff(dim=-1) != 0
    return int((is_new & (ordered != 0)).sum()) / count if count else 1.0
