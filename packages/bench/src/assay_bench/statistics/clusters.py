"""Statistics of clusters of similar items, such as questions on one text.

Shapes: N items, K clusters, R random sign patterns.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from assay_bench.statistics.accuracy import PairedAnswers

_PATTERNS = 9_999
_SEED = 0

Floats = NDArray[np.float64]


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
