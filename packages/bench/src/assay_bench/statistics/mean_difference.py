"""Bootstrap tests of the mean of paired differences, such as differences of log-probabilities.

Shapes: N items, K clusters, R resamples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from assay.errors import UsageError
from assay_bench.statistics.accuracy import sums_of_clusters

_RESAMPLES = 9_999
_SEED = 0
# Resamples drawn at a time, to bound memory.
_RESAMPLES_PER_PART = 500

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MeanDifference:
    """The mean of differences, candidate minus base, with its bootstrap distribution."""

    mean: float
    standard_error: float
    num_items: int
    num_clusters: int
    studentized: Floats
    """Sorted deviations of the resamples' means, in their own standard errors, (R,).

    Whole clusters are resampled. Resamples without variance are left out.
    """

    @classmethod
    def of(
        cls, differences: Sequence[float], clusters: Sequence[str] | None = None
    ) -> "MeanDifference":
        """Resample the differences.

        clusters: the cluster of each item; None if items are independent.
        Raises: UsageError for fewer than two clusters, which have no variance.
        """
        values_N = np.asarray(differences, dtype=np.float64)
        names = clusters or [str(number) for number in range(len(values_N))]
        sums_K, sizes_K = sums_of_clusters(differences, names)
        num_clusters = len(sums_K)
        if num_clusters < 2:
            raise UsageError(f"the items form {num_clusters} cluster; a variance needs at least 2")
        mean, error = _mean_and_error(sums_K[None], sizes_K[None])
        rng = np.random.default_rng(_SEED)
        parts = []
        for start in range(0, _RESAMPLES, _RESAMPLES_PER_PART):
            shape = (min(_RESAMPLES_PER_PART, _RESAMPLES - start), num_clusters)
            drawn_RK = rng.integers(num_clusters, size=shape)
            means_R, errors_R = _mean_and_error(sums_K[drawn_RK], sizes_K[drawn_RK])
            varied = errors_R > 0
            parts.append((means_R - mean[0])[varied] / errors_R[varied])
        return cls(
            float(mean[0]),
            float(error[0]),
            len(values_N),
            num_clusters,
            np.sort(np.concatenate(parts)),
        )

    def p_above(self, bound: float) -> float:
        """Compute the probability of a mean at least as high if the true mean is `bound`."""
        return self._p(self._distance(bound), np.greater_equal)

    def p_below(self, bound: float) -> float:
        """Compute the probability of a mean at least as low if the true mean is `bound`."""
        return self._p(self._distance(bound), np.less_equal)

    def interval(self, confidence: float) -> tuple[float, float]:
        """Return bounds of the true mean, with this two-sided confidence."""
        tail = (1 - confidence) / 2
        if not len(self.studentized):
            return self.mean, self.mean
        low, high = np.quantile(self.studentized, [1 - tail, tail])
        return self.mean - float(low) * self.standard_error, self.mean - float(
            high
        ) * self.standard_error

    def _distance(self, bound: float) -> float:
        if self.standard_error > 0:
            return (self.mean - bound) / self.standard_error
        # All differences are equal.
        return float(np.sign(self.mean - bound)) * np.inf if self.mean != bound else 0.0

    def _p(self, distance: float, reaches: np.ufunc) -> float:
        if not len(self.studentized):  # no variance: every resample has this mean
            return 1.0 if reaches(0.0, distance) else 1 / (1 + _RESAMPLES)
        return float((1 + reaches(self.studentized, distance).sum()) / (1 + len(self.studentized)))


def _mean_and_error(sums_RK: Floats, sizes_RK: Floats) -> tuple[Floats, Floats]:
    """Return the mean over items and its standard error, for each of R samples of clusters."""
    num_clusters = sums_RK.shape[1]
    num_items_R = sizes_RK.sum(axis=1)
    means_R = sums_RK.sum(axis=1) / num_items_R
    rests_RK = sums_RK - means_R[:, None] * sizes_RK
    variance_R = (rests_RK**2).sum(axis=1) * num_clusters / (num_clusters - 1)
    return means_R, np.sqrt(variance_R) / num_items_R
