"""Tests of paired differences, against published tables and sums over all outcomes."""

from itertools import product
from math import comb

import numpy as np
import pytest

from assay_bench.paired_statistics import (
    Differences,
    _saddlepoint,
    holm,
    holm_in_layers,
    items_needed,
    p_not_inferior,
    p_worse,
)


def answers(lost: int, gained: int, num: int) -> Differences:
    return Differences.of([-1.0] * lost + [1.0] * gained + [0.0] * (num - lost - gained), largest=1)


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (5, 0), (5, 3), (3, 5), (12, 12)])
def test_p_value_of_lost_items_matches_coin_flips(lost: int, gained: int) -> None:
    n = lost + gained
    exact = sum(comb(n, k) for k in range(lost, n + 1)) / 2**n
    assert p_worse(answers(lost, gained, 100)) == pytest.approx(exact)


@pytest.mark.parametrize("num", [3, 9, 13])
def test_p_value_of_numbers_matches_all_signs(num: int) -> None:
    values = np.random.default_rng(num).standard_t(3, num) - 0.5
    sums = np.array(list(product([-1, 1], repeat=num))) @ values
    exact = np.mean(sums <= values.sum() + 1e-12)
    assert p_worse(Differences.of(values.tolist())) == pytest.approx(exact)


def test_p_value_of_many_numbers_is_close_to_that_of_all_signs() -> None:
    values = np.random.default_rng(3).standard_t(4, 18) - 1.2
    sums = np.array(list(product([-1, 1], repeat=18))) @ values
    exact = np.mean(sums <= values.sum())
    assert 0.001 < exact < 0.05
    assert p_worse(Differences.of(values.tolist())) == pytest.approx(exact, rel=0.05)


@pytest.mark.parametrize(("values", "expected"), [([-0.1] * 30, 0.5**30), ([0.1] * 30, 1.0)])
def test_p_value_of_equal_signs_is_exact(values: list[float], expected: float) -> None:
    assert p_worse(Differences.of(values)) == pytest.approx(expected)
    assert _saddlepoint(np.array(values)) == pytest.approx(expected)


def test_lost_cluster_counts_as_one_item() -> None:
    # One text with eight lost questions is as likely by chance as one lost item.
    values, clusters = [-1.0] * 8 + [0.0] * 92, ["a"] * 8 + [f"b{n}" for n in range(92)]
    assert p_worse(Differences.of(values, clusters)) == pytest.approx(0.5)
    assert p_worse(Differences.of(values)) == pytest.approx(2**-8)


def test_documents_that_tasks_share_count_once() -> None:
    lost = Differences.of([-1.0] * 5, ["a", "b", "c", "d", "e"], largest=1)
    other = Differences.of([-1.0] * 5, ["f", "g", "h", "i", "j"], largest=1)
    assert p_worse(Differences.pooled([lost, lost])) == pytest.approx(2**-5)
    assert p_worse(Differences.pooled([lost, other])) == pytest.approx(2**-10)


def test_score_test_matches_the_published_example() -> None:
    # Tango 1998, table 2: two ways to disinfect lenses, margin 10 %.
    assert p_not_inferior(answers(1, 0, 44), 0.1) == pytest.approx(0.0438, abs=5e-5)


@pytest.mark.parametrize(
    ("lost", "gained", "num", "expected"),
    [
        # Tango 1998, table 4.
        (2, 12, 50, (0.0611, 0.3447)),
        (0, 14, 50, (0.1747, 0.4167)),
        (0, 0, 30, (-0.1135, 0.1135)),
    ],
)
def test_bounds_match_the_published_table(
    lost: int, gained: int, num: int, expected: tuple[float, float]
) -> None:
    found = answers(lost, gained, num)
    assert (found.lower_bound(0.025), found.upper_bound(0.025)) == pytest.approx(expected, abs=5e-5)


def test_bound_agrees_with_the_test() -> None:
    differences = answers(7, 4, 300)
    low, high = differences.lower_bound(0.05), differences.upper_bound(0.05)
    assert p_not_inferior(differences, -low) == pytest.approx(0.05, abs=1e-4)
    assert low < differences.mean < high


def test_few_items_without_losses_are_not_certain() -> None:
    assert p_not_inferior(answers(0, 0, 20), 0.02) > 0.2
    assert p_not_inferior(answers(0, 0, 200), 0.02) < 0.05


def test_equal_numbers_are_certain_after_a_few_items() -> None:
    # A loss of twice the margin has a chance of 1/2: one standard error for each item, z = √n.
    assert p_not_inferior(Differences.of([0.0] * 4), 0.01) == pytest.approx(0.0228, abs=1e-4)
    assert p_not_inferior(Differences.of([0.0]), 0.01) > 0.1
    nothing = Differences.of([0.0] * 9)
    assert (nothing.lower_bound(0.05), nothing.upper_bound(0.05)) == (0.0, 0.0)


def test_repeated_items_of_a_cluster_do_not_add_evidence() -> None:
    values = np.random.default_rng(0).normal(0, 0.05, 50)
    alone = Differences.of(values.tolist())
    repeated = Differences.of(np.repeat(values, 4).tolist(), [str(n // 4) for n in range(200)])
    assert p_worse(repeated) == pytest.approx(p_worse(alone))
    assert p_not_inferior(repeated, 0.01) == pytest.approx(p_not_inferior(alone, 0.01), rel=1e-6)


def test_smallest_p_value_is_multiplied_by_their_number() -> None:
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx(
        {"a": 0.03, "b": 0.06, "c": 0.06}
    )
    assert holm({"a": 0.9, "b": 0.8}) == {"a": 1.0, "b": 1.0}
    assert holm({}) == {}


def test_items_needed_for_ten_percent_discordance() -> None:
    # Tango's variance at a drop of 0.02 is 2q + 0.02 * 0.98 = 0.1031 with q = (sqrt(60² + 4 * 1960) + 60) / 4000.
    # (1.645 * sqrt(0.1031) + 1.282 * sqrt(0.1))² / 0.02²
    assert items_needed(answers(50, 50, 1_000), 0.02, 0.05, 0.9) == 2_178


def test_items_needed_without_a_difference() -> None:
    # (1.645 * sqrt(0.02 * 0.98) + 1.282 * sqrt(1 / 100))² / 0.02²: one item of 100 may change.
    assert items_needed(answers(0, 0, 100), 0.02, 0.05, 0.9) == 322
    # Equal numbers have the variance margin² at the drop: 1.645² items.
    assert items_needed(Differences.of([0.0, 0.0]), 0.02, 0.05, 0.9) == 3


def test_pool_and_tasks_share_the_significance() -> None:
    # 0.01 of one pool counts twice, 0.01 of one of four tasks eight times, as long as all are left.
    tasks, pool = holm_in_layers([{"a": 0.01, "b": 0.5, "c": 0.5, "d": 0.5}, {"all": 0.01}])
    assert pool["all"] == pytest.approx(0.02)
    # After the pool, the tasks have all of the significance.
    assert tasks["a"] == pytest.approx(0.04)
    assert holm_in_layers([{"a": 0.03, "b": 0.01}, {}]) == [{"a": 0.03, "b": 0.02}, {}]
