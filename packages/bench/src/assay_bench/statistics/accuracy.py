"""Paired tests of answers that are right or wrong, and statistics of clusters of similar items.

Only discordant items, which one of the two models got right, tell which model is better. Items of a cluster,
such as questions on one text, are correlated.
Shapes: N items, K clusters, R random sign patterns.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest, norm

_BOUND_PRECISION = 1e-6
_PATTERNS = 9_999
_SEED = 0
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PairedAnswers:
    """Counts of discordant items. Items in clusters count as fractions."""

    lost: float
    """Items that only the base got right."""
    gained: float
    """Items that only the candidate got right."""
    num_items: float

    @classmethod
    def of(cls, base: Sequence[bool], candidate: Sequence[bool]) -> "PairedAnswers":
        """Count the answers. Raises: ValueError for different lengths."""
        pairs = list(zip(base, candidate, strict=True))
        return cls(
            lost=sum(one and not other for one, other in pairs),
            gained=sum(other and not one for one, other in pairs),
            num_items=len(pairs),
        )

    @property
    def difference(self) -> float:
        """Return the accuracy of the candidate minus the accuracy of the base."""
        return (self.gained - self.lost) / self.num_items

    @property
    def discordance(self) -> float:
        """Return the share of discordant items."""
        return (self.gained + self.lost) / self.num_items


def p_worse(answers: PairedAnswers) -> float:
    """Compute the exact probability of losing at least as many items if both models are equally good.

    Source: McNemar, Psychometrika 12 (1947), 153-157, with the binomial distribution.
    """
    trials = int(answers.lost + answers.gained)
    if not trials:
        return 1.0
    return float(binomtest(int(answers.lost), trials, 0.5, alternative="greater").pvalue)


def p_not_inferior(answers: PairedAnswers, margin: float) -> float:
    """Compute the probability of a difference at least as good if the candidate is worse by `margin`.

    A score test: it estimates the share of discordant items under the null hypothesis, so that zero lost
    items do not count as certainty.
    Source: Tango, Statistics in Medicine 17 (1998), 891-908.
    """
    n, lost, gained = answers.num_items, answers.lost, answers.gained
    a = 2 * n
    b = -lost - gained - (2 * n + lost - gained) * margin
    c = lost * margin * (margin + 1)
    # Probability of losing an item if the accuracies differ by minus the margin.
    share_lost = (math.sqrt(b * b - 4 * a * c) - b) / (2 * a)
    variance = n * (2 * share_lost - margin * (margin + 1))
    if variance <= 0:
        return 1.0
    score = (gained - lost + n * margin) / math.sqrt(variance)
    return float(norm.sf(score))


def interval(answers: PairedAnswers, confidence: float) -> tuple[float, float]:
    """Return bounds of the difference in accuracy, with this two-sided confidence, from the score test."""
    significance = (1 - confidence) / 2
    mirrored = PairedAnswers(answers.gained, answers.lost, answers.num_items)
    return -_smallest_excluded_drop(answers, significance), _smallest_excluded_drop(
        mirrored, significance
    )


def _smallest_excluded_drop(answers: PairedAnswers, significance: float) -> float:
    low, high = -1.0 + _BOUND_PRECISION, 1.0 - _BOUND_PRECISION
    while high - low > _BOUND_PRECISION:
        middle = (low + high) / 2
        if p_not_inferior(answers, middle) < significance:
            high = middle
        else:
            low = middle
    return high


def sums_of_clusters(values: Sequence[float], clusters: Sequence[str]) -> tuple[Floats, Floats]:
    """Return the sum of values and the number of items of each cluster, both (K,)."""
    _, cluster_N = np.unique(np.asarray(clusters), return_inverse=True)
    values_N = np.asarray(values, dtype=np.float64)
    sums_K: Floats = np.bincount(cluster_N, weights=values_N).astype(np.float64)
    return sums_K, np.bincount(cluster_N).astype(np.float64)


def p_worse_of_clusters(differences: Sequence[float], clusters: Sequence[str]) -> float:
    """Compute the probability of at least as large a drop if both models are equally good.

    Under that hypothesis every cluster's sum is as likely to be negative. The test is exact except for
    the number of random sign patterns.
    differences: candidate minus base for each item.
    Source: Fisher, The Design of Experiments (1935), section 21.
    """
    sums_K, _ = sums_of_clusters(differences, clusters)
    rng = np.random.default_rng(_SEED)
    signs_RK = rng.choice(np.array([-1.0, 1.0]), size=(_PATTERNS, len(sums_K)))
    # Rounded, so that equal sums of whole numbers compare equal.
    as_low = np.round(signs_RK @ sums_K, 6) <= round(float(sums_K.sum()), 6)
    return float((1 + as_low.sum()) / (1 + _PATTERNS))


def deflated(
    answers: PairedAnswers, differences: Sequence[float], clusters: Sequence[str]
) -> PairedAnswers:
    """Scale the counts to the effective sample size, which correlation within clusters reduces.

    Source: Rao, Scott, Biometrics 48 (1992), 577-585: counts are divided by the design effect.
    """
    effect = design_effect(differences, clusters)
    return PairedAnswers(answers.lost / effect, answers.gained / effect, answers.num_items / effect)


def design_effect(differences: Sequence[float], clusters: Sequence[str]) -> float:
    """Return the factor by which clusters increase the variance of the mean; at least 1."""
    sums_K, sizes_K = sums_of_clusters(differences, clusters)
    num_items, num_clusters = sizes_K.sum(), len(sizes_K)
    mean = sums_K.sum() / num_items
    squares = float(np.square(np.asarray(differences) - mean).sum())
    if squares == 0 or num_clusters < 2:
        return 1.0
    of_clusters = (
        float(np.square(sums_K - mean * sizes_K).sum()) * num_clusters / (num_clusters - 1)
    )
    return max(1.0, float(of_clusters / (squares * num_items / (num_items - 1))))
