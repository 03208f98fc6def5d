"""Correction for multiple tests, and sample sizes."""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from scipy.stats import norm

Name = TypeVar("Name", bound=Hashable)


def holm(
    p_values: Mapping[Name, float], weights: Mapping[Name, float] | None = None
) -> dict[Name, float]:
    """Adjust p-values so that the significance is the chance of any false alarm among all of them.

    weights: shares of the significance; equal ones if None.
    Source: Holm, Scandinavian Journal of Statistics 6 (1979), 65-70.
    """
    shares = weights or dict.fromkeys(p_values, 1.0)
    adjusted: dict[Name, float] = {}
    largest, remaining = 0.0, math.fsum(shares[name] for name in p_values)
    for name in sorted(p_values, key=lambda name: p_values[name] / shares[name]):
        largest = max(largest, min(1.0, remaining * p_values[name] / shares[name]))
        adjusted[name] = largest
        remaining -= shares[name]
    return {name: adjusted[name] for name in p_values}


def holm_in_layers(layers: Sequence[Mapping[Name, float]]) -> list[dict[Name, float]]:
    """Adjust p-values of layers, such as single tasks and pools, which share the significance equally.

    A drop in all tasks needs no correction for their number, and a drop in one is not averaged out.
    """
    p_values = {(place, name): p for place, layer in enumerate(layers) for name, p in layer.items()}
    adjusted = holm(p_values, {key: 1 / len(layers[key[0]]) for key in p_values})
    return [{name: adjusted[place, name] for name in layer} for place, layer in enumerate(layers)]


def items_needed(variance: float, margin: float, significance: float, power: float) -> int:
    """Return how many items show, with probability `power`, that an equally good candidate is not worse.

    variance: of the difference of one item; for answers, the share of discordant items.
    margin: the drop to exclude.
    """
    num_errors = norm.isf(significance) + norm.isf(1 - power)
    return max(1, math.ceil(float(num_errors**2 * variance / margin**2)))
