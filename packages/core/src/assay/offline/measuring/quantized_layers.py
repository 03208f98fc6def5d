"""Detection of layers that only one side quantizes, by their storage dtype or by values on a coarser grid."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from assay.offline.measuring.shapes import coarsest_dtype
from assay.offline.ports.lanes import LanePair, Lanes, Port

# Numbers of sampled rows, and of sampled values in each.
_NUM_ROWS, _WIDTH = 32, 64
_LEAST_WIDTH = 32
# Of 64 normal values, rounding to 8 bits leaves 82% distinct (the largest value at 2.5 deviations), fp8
# 60% and 4 bits 25%. Both sides are first rounded to the coarser dtype of the two.
_MOST_DISTINCT = 0.9
# If both sides have fewer distinct values, the dtype itself is coarse.
_FEWEST_DISTINCT = 0.5
# Rounding to 3 bits causes a relative error of 0.2. Larger errors are not quantization.
_MOST_ERROR = 0.3
# Rounding to 8 bits, relative to the largest value. Smaller differences are not quantization.
_LEAST_DIFFERENCE = 2.0**-10


@dataclass(frozen=True, slots=True)
class Coarseness:
    """The share of distinct values in a row, on both sides."""

    actual: float
    expected: float

    @property
    def side(self) -> str:
        """Return the side with coarser values; "" for neither or both."""
        if max(self.actual, self.expected) < _FEWEST_DISTINCT:
            return ""
        if self.actual <= _MOST_DISTINCT * self.expected:
            return "ACTUAL"
        return "EXPECTED" if self.expected <= _MOST_DISTINCT * self.actual else ""


def measure_coarseness(
    value: Tensor, reference: Tensor, stored: Sequence[torch.dtype] = ()
) -> Coarseness | None:
    """Count the distinct values of two tensors, (R, C). Zeros do not count: they have other causes.

    stored: the dtypes in the dumps.
    Returns: None if the values agree, differ by more than quantization, or are too narrow.
    """
    dtype = coarsest_dtype(value.dtype, reference.dtype, *stored)
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
    """Return the share of distinct values per row, without zeros."""
    count = int(rows.count_nonzero())
    is_new = torch.ones_like(rows, dtype=torch.bool)
    ordered = rows.sort(-1).values
    is_new[:, 1:] = ordered.diff(dim=-1) != 0
    return int((is_new & (ordered != 0)).sum()) / count if count else 1.0


# Storage dtypes of quantized weights. int64 is left out: counters have it.
_STORED = ("int8", "uint8", "int32", "float8")


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """A module that only one side quantizes."""

    module: str
    side: str
    """EXPECTED or ACTUAL."""
    sign: str
    """The evidence, in words."""


def find_quantized_layers(
    expected: Lanes, actual: Lanes, pairs: list[LanePair], coarse: Mapping[Port, Coarseness]
) -> list[QuantizedLayer]:
    """Return the modules whose weights or results are quantized on one side only, in order.

    coarse: ports whose values lie on a coarser grid on one side.
    """
    stored = [
        {
            port.module: lane.first.dtype
            for port, lane in lanes.items()
            if (port.direction, port.phase) == ("parameter", "forward")
            and lane.first.dtype.startswith(_STORED)
        }
        for lanes in (expected, actual)
    ]
    found: dict[str, QuantizedLayer] = {}
    for pair in pairs:
        names = pair.expected.port.module, pair.actual.port.module
        dtypes = [known.get(name) for known, name in zip(stored, names, strict=True)]
        port = pair.port
        if bool(dtypes[0]) != bool(dtypes[1]):
            side = "EXPECTED" if dtypes[0] else "ACTUAL"
            sign = f"its weight is stored as {dtypes[0] or dtypes[1]}"
        elif port in coarse:
            distinct = coarse[port]
            side = distinct.side
            what = "weights" if port.direction == "parameter" else "results"
            sign = (
                f"{distinct.actual:.0%} of the {what} in a row are distinct, expected"
                f" {distinct.expected:.0%}"
            )
        else:
            continue
        found.setdefault(port.module, QuantizedLayer(port.module, side, sign))
    return list(found.values())
