"""Judges if one environment is slower than another, from the ratios of blocks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

from assay.errors import UsageError

Speed = Literal["slower", "not slower", "UNDERPOWERED"]

# Confidence of the interval for any symmetric distribution of the log ratios.
CONFIDENCE = 0.95

# With five blocks, the widest interval has a confidence of 1 - 2 / 2**5 = 93.75 %.
MIN_BLOCKS = 6


@dataclass(frozen=True, slots=True)
class RatioInterval:
    """The time of B relative to A, with an interval of at least 95 % confidence."""

    ratio: float
    lower: float
    upper: float

    def judge(self, margin: float) -> Speed:
        """Judge if B is slower by more than `margin`, a share: 0.05 for 5 %.

        Returns: UNDERPOWERED if the interval contains 1 + margin, so that more blocks are needed.
        """
        if self.lower > 1 + margin:
            return "slower"
        return "not slower" if self.upper < 1 + margin else "UNDERPOWERED"


def make_too_few_blocks_error(num_blocks: int) -> UsageError:
    """Make the error. num_blocks: the requested number."""
    return UsageError(
        f"{num_blocks} blocks are too few for an interval of {CONFIDENCE:.0%} confidence; at least"
        f" {MIN_BLOCKS} are needed"
    )


def ratio_interval(block_ratios: Sequence[float]) -> RatioInterval:
    """Compute the Hodges-Lehmann estimate of the blocks' common ratio, and its exact interval.

    block_ratios: one positive ratio per block. Blocks are independent because they are different
        processes; the rounds inside of a block are not.
    Raises: UsageError.
    Source: Hollander, Wolfe & Chicken, Nonparametric Statistical Methods, 3.2-3.3 (intervals from the
        signed-rank test).
    """
    if len(block_ratios) < MIN_BLOCKS:
        raise make_too_few_blocks_error(len(block_ratios))
    logs = [math.log(ratio) for ratio in block_ratios]
    return RatioInterval(
        ratio=math.exp(median(_walsh_averages(logs))),
        lower=math.exp(_lower_end(logs)),
        upper=math.exp(-_lower_end([-value for value in logs])),
    )


def _walsh_averages(values: Sequence[float]) -> list[float]:
    return sorted((one + other) / 2 for n, one in enumerate(values) for other in values[n:])


def _lower_end(values: Sequence[float]) -> float:
    """Return the smallest center of symmetry that the signed-rank test does not reject as too small."""
    from scipy.stats import wilcoxon

    averages = _walsh_averages(values)
    for below, above in pairwise(averages):
        center = (below + above) / 2
        if not below < center < above:
            continue  # equal averages have no center between them
        differences = [value - center for value in values]
        p = wilcoxon(differences, alternative="greater", method="exact").pvalue
        if p > (1 - CONFIDENCE) / 2:
            return below
    return averages[0]
