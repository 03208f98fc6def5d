"""Several tests at once, and how many items a test needs."""

import math
from collections.abc import Mapping

from scipy.stats import norm


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """P-values adjusted so that the chance of any false alarm among all of them is the significance.

    Source: Holm, Scandinavian Journal of Statistics 6 (1979), 65-70.
    """
    adjusted: dict[str, float] = {}
    largest = 0.0
    for place, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[name]))
        adjusted[name] = largest
    return {name: adjusted[name] for name in p_values}


def items_needed(variance: float, margin: float, significance: float, power: float) -> int:
    """Of how many items a candidate that is equally good is shown to be, with probability `power`.

    variance: of the difference of one item; of answers it is the share that only one of two models has
    right. margin: by how much it must not be worse.
    """
    reach = norm.isf(significance) + norm.isf(1 - power)
    return max(1, math.ceil(float(reach**2 * variance / margin**2)))
