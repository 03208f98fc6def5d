import numpy as np
import pytest
from scipy.stats import ttest_1samp

from assay.errors import UsageError
from assay_bench.statistics.mean_difference import MeanDifference


def test_p_values_of_normal_differences_match_students_test() -> None:
    values = np.random.default_rng(1).normal(-0.008, 0.1, 400)
    mean = MeanDifference.of(values.tolist())
    student = ttest_1samp(values, 0, alternative="less")
    assert mean.mean == pytest.approx(values.mean())
    assert mean.standard_error == pytest.approx(values.std(ddof=1) / 20)
    assert mean.p_below(0.0) == pytest.approx(student.pvalue, abs=0.01)
    low, high = mean.interval(0.9)
    assert high == pytest.approx(student.confidence_interval(0.95).high, abs=1e-3)
    assert low < mean.mean < high


def test_equal_items_of_a_cluster_count_once() -> None:
    values = np.random.default_rng(2).normal(0, 1, 50)
    alone = MeanDifference.of(values.tolist())
    repeated = MeanDifference.of(
        np.repeat(values, 8).tolist(), [f"c{number // 8}" for number in range(400)]
    )
    assert repeated.standard_error == pytest.approx(alone.standard_error)
    assert (repeated.num_items, repeated.num_clusters) == (400, 50)


def test_constant_difference_is_certain() -> None:
    lower = MeanDifference.of([-0.5] * 10)
    assert (lower.p_below(0.0), lower.p_above(-1.0), lower.p_above(0.0)) == (1e-4, 1e-4, 1.0)
    assert lower.interval(0.9) == (-0.5, -0.5)
    same = MeanDifference.of([0.0] * 10)
    assert same.p_below(0.0) == 1.0


def test_one_cluster_is_refused() -> None:
    with pytest.raises(UsageError, match="the items form 1 cluster; a variance needs at least 2"):
        MeanDifference.of([1.0, 2.0], ["a", "a"])
