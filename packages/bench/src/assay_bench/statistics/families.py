"""Correction for multiple tests, and sample sizes."""

import math
from collections.abc import Hashable, Mapping
from typing import TypeVar

from scipy.stats import norm

Name = TypeVar("Name", bound=Hashable)


def holm(p_values: Mapping[Name, float]) -> dict[Name, float]:
    """Adjust p-values so that the significance is the chance of any false alarm among all of them.

    Source: Holm, Scandinavian Journal of Statistics 6 (1979), 65-70.
    """
    adjusted: dict[Name, float] = {}
    largest = 0.0
    for place, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[name]))
        adjusted[name] = largest
    return {name: adjusted[name] for name in p_values}


def items_needed(variance: float, margin: float, significance: float, power: float) -> int:
    """Return how many items show, with probability `power`, that an equally good candidate is not worse.

    variance: of the difference of one item; for answers, the share of discordant items.
    margin: the drop to exclude.
    """
    num_errors = norm.isf(significance) + norm.isf(1 - power)
    return max(1, math.ceil(float(num_errors**2 * variance / margin**2)))
