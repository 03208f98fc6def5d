"""Bins of the expected value, in units of its root mean square.

Their edges are the quantiles n/24 of a normal distribution, and tails, where saturating functions (softcaps,
activations) act. Edges are multiples of a cell, so that a table gives the bin of a value. A search takes ten
times as long.
"""

from bisect import bisect_left
from statistics import NormalDist

import torch
from torch import Tensor

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
