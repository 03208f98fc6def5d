"""How often a slow-down in a history is found, and how often there is one where there is none.

Simulated, so that there are thousands: `pytest packages/bench/tests/rates --capture=no`.
"""

import pytest

from assay_bench.performance.history.change_points import find_change_points
from packages.bench.tests.simulated_histories import Noise, simulate_ratios

pytest.importorskip("ruptures", reason="it has no release for this Python")
pytestmark = pytest.mark.timeout(3600)

NUM_NOISY = 1_000
NUM_CHANGED = 400
RUNS_BEFORE = 30
NOISES = {
    "usual": Noise(),
    "quiet": Noise(run=0.01, control=0.005),
    "loud": Noise(run=0.04, control=0.02),
    "drift half seen": Noise(seen=0.5),
}


def slower_rate(noise: Noise, num_runs: int) -> float:
    """Share of histories without a change in which something became slower."""
    alarms = 0
    for seed in range(NUM_NOISY):
        changes = find_change_points(simulate_ratios(seed, num_runs, noise=noise))
        alarms += any(change.factor > 1 for change in changes)
    return alarms / NUM_NOISY


def found_rate(noise: Noise, factor: float, runs_after: int) -> float:
    """Share of histories in which the change is found, at most five runs from where it is."""
    found = 0
    for seed in range(NUM_CHANGED):
        ratios = simulate_ratios(seed, RUNS_BEFORE + runs_after, [(RUNS_BEFORE, factor)], noise)
        found += any(
            change.factor > 1 and abs(change.index - RUNS_BEFORE) <= 5
            for change in find_change_points(ratios)
        )
    return found / NUM_CHANGED


@pytest.mark.parametrize(
    ("name", "at_most"),
    [("usual", 0.01), ("quiet", 0.01), ("loud", 0.01), ("drift half seen", 1.0)],
)
def test_noise_gives_few_alarms(name: str, at_most: float) -> None:
    rates = {num_runs: slower_rate(NOISES[name], num_runs) for num_runs in (40, 60)}
    for num_runs, rate in rates.items():
        print(f"{name}: {num_runs} runs, unchanged: {rate:.2%} alarms")  # noqa: T201
    assert max(rates.values()) <= at_most


@pytest.mark.parametrize("name", ["usual", "quiet", "loud"])
@pytest.mark.parametrize("factor", [1.03, 1.1])
def test_slow_downs_are_found(name: str, factor: float) -> None:
    rates = {after: found_rate(NOISES[name], factor, after) for after in (5, 10, 20, 30)}
    line = ", ".join(f"{rate:.1%} after {after}" for after, rate in rates.items())
    print(f"{name}: {factor - 1:.0%} slower: found {line} runs")  # noqa: T201
    assert rates[30] >= rates[5]
