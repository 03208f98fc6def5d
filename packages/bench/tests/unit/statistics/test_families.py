import pytest

from assay_bench.statistics.accuracy import (
    PairedAnswers,
    deflated,
    design_effect,
    p_worse_of_clusters,
)
from assay_bench.statistics.families import holm, items_needed


def test_smallest_p_value_is_multiplied_by_their_number() -> None:
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx(
        {"a": 0.03, "b": 0.06, "c": 0.06}
    )
    assert holm({"a": 0.9, "b": 0.8}) == {"a": 1.0, "b": 1.0}
    assert holm({}) == {}


def test_items_needed_for_ten_percent_discordance() -> None:
    # (1.645 + 1.282)² * 0.1 / 0.02²
    assert items_needed(0.1, 0.02, 0.05, 0.9) == 2141


def test_lost_cluster_counts_as_one_item() -> None:
    # One text with eight lost questions is as likely by chance as one lost item.
    differences, clusters = [-1.0] * 8 + [0.0] * 92, ["a"] * 8 + [f"b{n}" for n in range(92)]
    assert p_worse_of_clusters(differences, clusters) == pytest.approx(0.5, abs=0.02)
    assert p_worse_of_clusters(differences, [str(n) for n in range(100)]) == pytest.approx(
        2**-8, abs=2e-3
    )


def test_counts_are_scaled_to_the_effective_sample_size() -> None:
    # Every cluster repeats one item four times.
    differences = [value for value in (-1.0, 0.0, 0.0, 1.0, 0.0) * 20 for _ in range(4)]
    clusters = [f"c{number // 4}" for number in range(400)]
    assert design_effect(differences, clusters) == pytest.approx(4, rel=0.02)
    fewer = deflated(PairedAnswers(80, 80, 400), differences, clusters)
    assert (fewer.lost, fewer.num_items) == pytest.approx((20, 100), rel=0.02)
    assert fewer.discordance == pytest.approx(0.4)


def test_clusters_never_increase_counts() -> None:
    assert design_effect([1.0, -1.0] * 10, [f"c{n // 2}" for n in range(20)]) == 1.0
    assert design_effect([0.0] * 10, ["a", "b"] * 5) == 1.0
