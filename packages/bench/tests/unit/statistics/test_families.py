import pytest

from assay_bench.paired_statistics import holm, holm_in_layers, items_needed


def test_smallest_p_value_is_multiplied_by_their_number() -> None:
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx(
        {"a": 0.03, "b": 0.06, "c": 0.06}
    )
    assert holm({"a": 0.9, "b": 0.8}) == {"a": 1.0, "b": 1.0}
    assert holm({}) == {}


def test_items_needed_for_ten_percent_discordance() -> None:
    # (1.645 + 1.282)² * 0.1 / 0.02²
    assert items_needed(0.1, 0.02, 0.05, 0.9) == 2141


def test_pool_and_tasks_share_the_significance() -> None:
    # 0.01 of one pool counts twice, 0.01 of one of four tasks eight times, as long as all are left.
    tasks, pool = holm_in_layers([{"a": 0.01, "b": 0.5, "c": 0.5, "d": 0.5}, {"all": 0.01}])
    assert pool["all"] == pytest.approx(0.02)
    # After the pool, the tasks have all of the significance.
    assert tasks["a"] == pytest.approx(0.04)
    assert holm_in_layers([{"a": 0.03, "b": 0.01}, {}]) == [{"a": 0.03, "b": 0.02}, {}]
