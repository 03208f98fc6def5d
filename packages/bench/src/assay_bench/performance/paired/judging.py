"""Whether one environment is slower than another, from ratios of blocks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

from assay.errors import UsageError

Speed = Literal["slower", "not slower", "UNDERPOWERED"]

# Of the interval, whatever the ratios are distributed like.
CONFIDENCE = 0.95

# With five blocks the widest interval there is covers 1 - 2 / 2**5 = 93.75 %.
FEWEST_BLOCKS = 6


@dataclass(frozen=True, slots=True)
class RatioInterval:
    """How many times as long B takes as A, with an interval of at least 95 % confidence."""

    ratio: float
    lower: float
    upper: float

    def judge(self, margin: float) -> Speed:
        """Whether B is slower by more than `margin`, a share: 0.05 for 5 %.

        UNDERPOWERED where the interval holds 1 + margin: more blocks are needed to decide.
        """
        if self.lower > 1 + margin:
            return "slower"
        return "not slower" if self.upper < 1 + margin else "UNDERPOWERED"


class TooFewBlocksError(UsageError):
    """Fewer blocks than any interval of the wanted confidence needs."""

    @classmethod
    def of(cls, num_blocks: int) -> "TooFewBlocksError":
        """`num_blocks`: what was asked for."""
        return cls(
            f"{num_blocks} blocks give no interval of {CONFIDENCE:.0%} confidence; at least"
            f" {FEWEST_BLOCKS} do"
        )


def ratio_interval(block_ratios: Sequence[float]) -> RatioInterval:
    """The Hodges-Lehmann estimate of the blocks' common ratio, and its exact interval.

    block_ratios: one for each block, above zero. They are processes of their own, and so independent;
        the rounds inside of a block are not.
    Raises: TooFewBlocksError.
    Source: Hollander, Wolfe & Chicken, Nonparametric Statistical Methods, 3.2-3.3 (intervals from the
        signed-rank test).
    """
    if len(block_ratios) < FEWEST_BLOCKS:
        raise TooFewBlocksError.of(len(block_ratios))
    logs = [math.log(ratio) for ratio in block_ratios]
    return RatioInterval(
        ratio=math.exp(median(_walsh_averages(logs))),
        lower=math.exp(_lower_end(logs)),
        upper=math.exp(-_lower_end([-value for value in logs])),
    )


def _walsh_averages(values: Sequence[float]) -> list[float]:
    return sorted((one + other) / 2 for n, one in enumerate(values) for other in values[n:])


def _lower_end(values: Sequence[float]) -> float:
    """The smallest centre of symmetry that the signed-rank test does not refuse as too small."""
    from scipy.stats import wilcoxon

    averages = _walsh_averages(values)
    for below, above in pairwise(averages):
        centre = (below + above) / 2
        if not below < centre < above:
            continue  # equal ones: no centre lies between them
        differences = [value - centre for value in values]
        p = wilcoxon(differences, alternative="greater", method="exact").pvalue
        if p > (1 - CONFIDENCE) / 2:
            return below
    return averages[0]
