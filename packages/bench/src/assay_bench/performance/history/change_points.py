"""Where a series of ratios changes its level, by ranks: outliers and units do not matter.

The best split of a series is found by ruptures; whether there is one is decided by permutations, as the
split is the best of many. Both parts are then searched in the same way.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from assay.errors import MachineError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# The chance that a series of runs that are all alike is said to have changed. A check of eight suites
# every day is then wrong once in four months at most, and half of these are said to be faster.
SIGNIFICANCE = 0.001

# A smaller change of level is none: a machine's drift moves ratios by as much, as its control follows
# only most of it, and drift is not in random order. Measured by `tests/rates`.
SMALLEST_STEP = 0.02

# Fewer runs on one side of a change could be chance whatever they are: the three slowest of thirty
# stand last with probability 1 / 4060, and there are as many places to look at as runs.
FEWEST_RUNS = 4

# One change, or two: what became faster and then slower again has no single clear one.
_NUMS_OF_CHANGES = (1, 2)
_LIMIT = SIGNIFICANCE / len(_NUMS_OF_CHANGES)

# Permutations, in parts of which no more are made than decide. The least p that they can give is a
# fifth of the limit.
_PART, _NUM_PARTS = 200, 50


@dataclass(frozen=True, slots=True)
class ChangePoint:
    """A change of level.

    index: of the first run after it. before, after: median ratios of the runs up to the next change
        on each side. p: the probability of so clear a split if all runs were alike.
    """

    index: int
    before: float
    after: float
    p: float

    @property
    def factor(self) -> float:
        """How many times as long it takes since; above 1 is slower."""
        return self.after / self.before


def find_change_points(ratios: Sequence[float]) -> list[ChangePoint]:
    """All changes of level in `ratios`, one for each run in the order of time, each above zero.

    Raises: MachineError where ruptures is not installed.
    Source: the division with permutations is that of Matteson & James, JASA 109 (2014), 3; the sum of
        squares between ranks that of Pettitt, Applied Statistics 28 (1979).
    """
    found = sorted(_search(ratios, 0, len(ratios)))
    levels = _levels(ratios, [index for index, _ in found])
    return [
        ChangePoint(index=index, before=before, after=after, p=p)
        for (index, p), (before, after) in zip(found, pairwise(levels), strict=True)
    ]


def _levels(ratios: Sequence[float], splits: Sequence[int]) -> list[float]:
    """The median of each part; one for a series without any run."""
    ends = [0, *splits, len(ratios)]
    return [median(ratios[start:stop] or [1.0]) for start, stop in pairwise(ends)]


def _search(ratios: Sequence[float], start: int, stop: int) -> list[tuple[int, float]]:
    """Indices of all changes in this part of the series, with their p."""
    from scipy.stats import rankdata

    part = ratios[start:stop]
    for num_changes in _NUMS_OF_CHANGES:
        if len(part) < (num_changes + 1) * FEWEST_RUNS:
            break
        splits, gain = _best_splits(rankdata(part), num_changes)
        if not _all_large(_levels(part, splits)):
            continue
        p = _probability(gain, len(part), num_changes)
        if p <= _LIMIT:
            ends = [start, *(start + split for split in splits), stop]
            inner = [found for a, b in pairwise(ends) for found in _search(ratios, a, b)]
            return [*((end, p) for end in ends[1:-1]), *inner]
    return []


def _all_large(levels: Sequence[float]) -> bool:
    return all(
        abs(math.log(after / before)) >= math.log1p(SMALLEST_STEP)
        for before, after in pairwise(levels)
    )


def _best_splits(ranks: "NDArray[np.float64]", num_changes: int) -> tuple[list[int], float]:
    """Where parts differ most, and the sum of squares between them."""
    try:
        from ruptures import KernelCPD
    except ModuleNotFoundError as error:
        raise MachineError(
            "change points are searched by ruptures, which is not installed (it has no release for"
            " Python 3.14 yet): pip install ruptures"
        ) from error
    search = KernelCPD(kernel="linear", min_size=FEWEST_RUNS)
    ends = [0, *search.fit(ranks[:, None]).predict(n_bkps=num_changes)]
    mean = ranks.mean()
    gain = sum((b - a) * (ranks[a:b].mean() - mean) ** 2 for a, b in pairwise(ends))
    return ends[1:-1], float(gain)


def _probability(gain: float, num_runs: int, num_changes: int) -> float:
    """Of splits at least as good as `gain` among runs in random order; over _LIMIT only roughly."""
    at_least, num_orders = 0, 0
    for part in range(_NUM_PARTS):
        by_chance = _gains_by_chance(num_runs, num_changes, part)
        at_least += sum(other >= gain for other in by_chance)
        num_orders += _PART
        if at_least > _LIMIT * _PART * _NUM_PARTS:
            break
    return (1 + at_least) / (1 + num_orders)


@cache
def _gains_by_chance(num_runs: int, num_changes: int, part: int) -> tuple[float, ...]:
    """Gains of random orders: of ranks they depend on nothing but their number."""
    import numpy as np

    rng = np.random.default_rng([num_runs, num_changes, part])
    ranks = np.arange(1.0, num_runs + 1)
    return tuple(_best_splits(rng.permutation(ranks), num_changes)[1] for _ in range(_PART))
