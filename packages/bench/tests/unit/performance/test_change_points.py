import math

import pytest

from assay_bench.performance.history.change_points import FEWEST_RUNS, find_change_points
from packages.bench.tests.simulated_histories import simulate_ratios

pytest.importorskip("ruptures", reason="it has no release for this Python")

# One below, one above, in no order that trends: ratios of twenty runs that are alike.
STEADY = [1.0 + 0.001 * ((7 * n) % 20 - 10) for n in range(20)]


def test_a_step_is_found_at_its_first_run() -> None:
    (found,) = find_change_points([*STEADY, *(1.1 * ratio for ratio in STEADY)])
    assert found.index == 20
    assert found.factor == pytest.approx(1.1)
    # No order of forty ranks splits better: p is the least that the permutations can give.
    assert found.p == pytest.approx(1 / 10_001)


def test_a_faster_machine_is_a_change_too() -> None:
    (found,) = find_change_points([*STEADY, *(0.9 * ratio for ratio in STEADY)])
    assert found.factor == pytest.approx(0.9)


def test_what_went_up_and_down_again_is_two_changes() -> None:
    found = find_change_points([*STEADY, *(1.1 * ratio for ratio in STEADY), *STEADY])
    assert [change.index for change in found] == [20, 40]
    assert found[1].factor == pytest.approx(1 / 1.1)


def test_a_slow_down_after_an_improvement_is_found() -> None:
    found = find_change_points([*STEADY, *(0.9 * ratio for ratio in STEADY), *STEADY])
    assert [change.index for change in found] in ([20, 40], [20, 41])
    assert found[1].factor == pytest.approx(1 / 0.9, rel=0.002)


@pytest.mark.parametrize("outlier", [3.0, 1e9, 1e-9])
def test_an_outlier_is_no_change_and_hides_none(outlier: float) -> None:
    spoiled = [*STEADY]
    spoiled[12] = outlier
    assert find_change_points(spoiled) == []
    (found,) = find_change_points([*spoiled, *(1.1 * ratio for ratio in STEADY)])
    # The first run after it may go with those before: one of these is slower than all that follow.
    assert found.index in (20, 21)


def test_a_step_of_less_than_two_per_cent_is_none() -> None:
    assert find_change_points([*STEADY, *(1.015 * ratio for ratio in STEADY)]) == []


@pytest.mark.parametrize("ratios", [[], [1.0], [1.0] * (2 * FEWEST_RUNS - 1), [1.0] * 40])
def test_too_few_or_equal_runs_do_not_change(ratios: list[float]) -> None:
    assert find_change_points(ratios) == []


def test_a_denormal_is_a_number_like_others() -> None:
    tiny = 5e-324
    (found,) = find_change_points([tiny] * 10 + [4 * tiny] * 10)
    assert (found.index, found.factor) == (10, 4.0)


def test_thirty_noisy_histories_give_no_alarm() -> None:
    changes = [find_change_points(simulate_ratios(seed)) for seed in range(30)]
    assert [found for found in changes if any(change.factor > 1 for change in found)] == []


@pytest.mark.parametrize(("factor", "at_least"), [(1.03, 5), (1.1, 19)])
def test_injected_slow_downs_are_found(factor: float, at_least: int) -> None:
    """Of 20 histories, 20 runs after it; measured on more by `tests/rates`."""
    found = 0
    for seed in range(20):
        changes = find_change_points(simulate_ratios(seed, 50, [(30, factor)]))
        found += any(abs(c.index - 30) <= 5 and c.factor > 1 for c in changes)
    assert found >= at_least


def test_the_simulated_noise_is_what_it_says() -> None:
    logs = [math.log(ratio / 5) for seed in range(50) for ratio in simulate_ratios(seed)]
    inner = sorted(logs)[len(logs) // 20 : -len(logs) // 10]
    # Two per cent of the suite, one of the control, half of drift that it does not see.
    assert max(inner) - min(inner) == pytest.approx(2 * 1.5 * 0.023, rel=0.2)
