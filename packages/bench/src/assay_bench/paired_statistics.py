"""Tests of paired differences, candidate minus base, of answers and of numbers alike, and their correction for many tests.

Items of a cluster, such as questions on one text, are correlated. The tests use sums over clusters.
Shapes: K independent clusters; single items without clusters.
"""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import binom, norm

# More distinct magnitudes, or more sums, are approximated.
_MOST_MAGNITUDES, _MOST_SUMS = 16, 1 << 20
_DIGITS = 9
# In standard deviations: nearer to the mean, the saddlepoint formula divides by zero.
_NEAR_MEAN = 1e-3
# Bounds of a difference are found to this share of the largest difference.
_BOUND_PRECISION = 1e-7

Floats = NDArray[np.float64]
Strings = NDArray[np.str_]


@dataclass(frozen=True)
class Differences:
    """Differences of paired items, summed over clusters; higher is better."""

    sums_K: Floats
    sizes_K: Floats
    names_K: Strings
    largest: float
    """The largest change of one item: 1 for answers, otherwise the largest that occurred."""

    @classmethod
    def of(
        cls,
        values: Sequence[float],
        clusters: Sequence[str] | None = None,
        *,
        largest: float | None = None,
    ) -> "Differences":
        """Sum the differences over clusters, by default of one item each."""
        values_N = np.asarray(values, dtype=np.float64)
        names = [str(number) for number in range(len(values_N))] if clusters is None else clusters
        seen = float(np.abs(values_N).max(initial=0.0))
        return cls._summed(
            values_N,
            np.ones(len(values_N)),
            np.asarray(names, dtype=np.str_),
            seen if largest is None else largest,
        )

    @classmethod
    def pooled(cls, parts: Iterable["Differences"]) -> "Differences":
        """Join several tasks. Clusters of the same name, such as one document, become one."""
        given = list(parts)
        return cls._summed(
            np.concatenate([part.sums_K for part in given]),
            np.concatenate([part.sizes_K for part in given]),
            np.concatenate([part.names_K for part in given]),
            max(part.largest for part in given),
        )

    @classmethod
    def _summed(
        cls, sums_N: Floats, sizes_N: Floats, names_N: Strings, largest: float
    ) -> "Differences":
        names_K, place_N = np.unique(names_N, return_inverse=True)
        sums_K, sizes_K = (
            np.bincount(place_N, weights=one).astype(np.float64) for one in (sums_N, sizes_N)
        )
        return cls(sums_K, sizes_K, names_K, largest)

    @property
    def num_items(self) -> int:
        """Return the number of items in all clusters."""
        return int(self.sizes_K.sum())

    @cached_property
    def mean(self) -> float:
        """Return the mean over items."""
        return float(self.sums_K.sum() / self.sizes_K.sum())

    @property
    def variance(self) -> float:
        """Return the variance of the mean times the number of items."""
        rests_K = self.sums_K - self.mean * self.sizes_K
        return float(np.square(rests_K).sum() / self.sizes_K.sum())

    def mirrored(self) -> "Differences":
        """Return the differences with the opposite sign."""
        return replace(self, sums_K=-self.sums_K)

    def lower_bound(self, significance: float) -> float:
        """Return the lower bound of the mean from the score test, one-sided."""
        return 0.0 - _smallest_excluded_drop(self, significance)

    def upper_bound(self, significance: float) -> float:
        """Return the upper bound of the mean from the score test, one-sided."""
        return _smallest_excluded_drop(self.mirrored(), significance)


def p_worse(differences: Differences) -> float:
    """Compute the probability of a sum at least as low if both models are equally good.

    Then each cluster's sum has either sign with equal probability. The distribution is exact for up to 16
    magnitudes, and for whole numbers such as counts of answers: it is McNemar's for single items, and
    the conditional test stratified by task for several tasks. Otherwise it is a saddlepoint approximation.
    Sources: Fisher, The Design of Experiments (1935), section 21; McNemar, Psychometrika 12 (1947), 153-157.
    """
    largest = float(np.abs(differences.sums_K).max(initial=0.0))
    if not largest:
        return 1.0
    scaled_K = differences.sums_K / largest
    total = round(float(scaled_K.sum()), _DIGITS)
    magnitudes, counts = np.unique(np.abs(scaled_K.round(_DIGITS)), return_counts=True)
    if len(magnitudes) > _MOST_MAGNITUDES:
        return _saddlepoint(scaled_K)
    sums: Floats = np.zeros(1)
    chances = np.ones(1)
    for magnitude, count in zip(magnitudes, counts, strict=True):
        if not magnitude:
            continue
        if len(sums) * (count + 1) > _MOST_SUMS:
            return _saddlepoint(scaled_K)
        positive = np.arange(count + 1)
        every = sums[:, None] + magnitude * (2 * positive - count)
        weights = chances[:, None] * binom.pmf(positive, count, 0.5)
        sums, place = np.unique(every.round(_DIGITS).ravel(), return_inverse=True)
        chances = np.bincount(place.ravel(), weights=weights.ravel()).astype(np.float64)
    as_low = sums <= total + 10.0**-_DIGITS * len(scaled_K)
    return min(1.0, float(chances[as_low].sum()))


def _saddlepoint(values_K: Floats) -> float:
    """Approximate the probability that randomly signed values have a sum at most as low.

    Sources: Robinson, Journal of the Royal Statistical Society B 44 (1982), 91-101; Lugannani, Rice,
    Advances in Applied Probability 12 (1980), 475-490.
    """
    sizes_K = np.abs(values_K[values_K != 0])
    total = float(values_K.sum())
    if sizes_K.sum() - abs(total) <= 10.0**-_DIGITS:  # all signs are equal
        return float(0.5 ** len(sizes_K)) if total < 0 else 1.0

    def excess(tilt: float) -> float:
        return float((sizes_K * np.tanh(tilt * sizes_K)).sum()) - total

    reach = 1.0
    while excess(reach) < 0 or excess(-reach) > 0:
        reach *= 2
    tilt = float(brentq(excess, -reach, reach, xtol=1e-12))
    scaled_K = np.abs(tilt * sizes_K)
    # log(cosh(x)), without overflow
    cumulants = float((scaled_K + np.log1p(np.exp(-2 * scaled_K)) - math.log(2)).sum())
    root = math.copysign(math.sqrt(max(0.0, 2 * (tilt * total - cumulants))), tilt)
    spread = tilt * math.sqrt(float((sizes_K**2 * (1 - np.tanh(scaled_K) ** 2)).sum()))
    if abs(root) < _NEAR_MEAN:
        return float(norm.cdf(root))
    return float(min(1.0, max(0.0, norm.cdf(root) + norm.pdf(root) * (1 / root - 1 / spread))))


def p_not_inferior(differences: Differences, margin: float) -> float:
    """Compute the probability of a mean at least as high if the candidate is worse by `margin`.

    A score test: its variance is that of the most likely distribution whose mean is minus the margin
    (empirical likelihood). The largest possible loss may have a probability even if it did not occur, so
    that zero lost items do not count as certainty. For single answers, this is Tango's test.
    Sources: Tango, Statistics in Medicine 17 (1998), 891-908; Owen, Annals of Statistics 18 (1990), 90-120.
    """
    total = (differences.mean + margin) * differences.num_items
    variance = _variance_at(differences, margin)
    return float(norm.sf(total / math.sqrt(variance))) if variance else 1.0


def _variance_at(differences: Differences, margin: float) -> float:
    """Return the variance of the sum if the mean is minus `margin`; 0 if nothing can change."""
    num = len(differences.sums_K)
    size = differences.num_items / num
    rests_K = differences.sums_K + margin * differences.sizes_K
    largest = max(differences.largest, float(np.abs(differences.sums_K).max()))
    worst = min(margin * size - max(largest, 2 * margin * size), float(rests_K.min()))
    if worst >= 0:
        return 0.0
    if rests_K.sum() <= 0:
        return float(np.square(rests_K).sum())

    def mean_of_tilted(tilt: float) -> float:
        return float((rests_K / (1 + tilt * rests_K)).sum())

    tilt = -1 / worst * (1 - 1e-12)
    if mean_of_tilted(tilt) < 0:
        tilt = float(brentq(mean_of_tilted, 0.0, tilt, xtol=1e-15, rtol=1e-12))
    weights_K = 1 / (num * (1 + tilt * rests_K))
    rest = max(0.0, 1 - float(weights_K.sum()))
    return num * (float((weights_K * rests_K**2).sum()) + rest * worst**2)


def _smallest_excluded_drop(differences: Differences, significance: float) -> float:
    reach = max(differences.largest, float(np.abs(differences.sums_K / differences.sizes_K).max()))
    if not reach:
        return 0.0

    def excess(margin: float) -> float:
        return p_not_inferior(differences, margin) - significance

    low, high = -reach * (1 - _BOUND_PRECISION), reach * (1 - _BOUND_PRECISION)
    if excess(high) >= 0:
        return high
    if excess(low) <= 0:
        return low
    return float(brentq(excess, low, high, xtol=_BOUND_PRECISION * reach))


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


def items_needed(differences: Differences, margin: float, significance: float, power: float) -> int:
    """Return how many items exclude a drop of `margin`, with probability `power`, if the mean is zero.

    The score test has one variance if the candidate is worse by the margin, and another if it is as good.
    At least one item has the largest difference: a variance of zero would ask for too few items.
    Source: Nam, Biometrics 53 (1997), 1422-1430 (sample size of the score test of paired answers).
    """
    num = differences.num_items
    equal = replace(differences, sums_K=differences.sums_K - differences.mean * differences.sizes_K)
    variance = max(equal.variance, differences.largest**2 / num)
    errors = norm.isf(significance) * math.sqrt(_variance_at(equal, margin) / num)
    errors += norm.isf(1 - power) * math.sqrt(variance)
    return math.ceil(float(errors / margin) ** 2)
