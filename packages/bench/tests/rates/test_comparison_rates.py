"""Error rates of comparisons, compared with their nominal rates.

`nox -s bench-rates` prints them. Each row simulates pairs of evaluations.
"""

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binom, norm

from assay_bench.paired_statistics import (
    Differences,
    holm,
    holm_in_layers,
    items_needed,
    p_not_inferior,
    p_worse,
)

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.timeout(3600)

NUM_PAIRS = 2_000
NOMINAL = 0.05
POWER = 0.9
# Tolerance of a rate over 2,000 pairs.
ALLOWED = 0.015
SIZES = (100, 400, 1_319)
CLUSTER = 5
MARGIN, MARGIN_NATS = 0.03, 0.01
# Simulated suites of several tasks.
NUM_SUITES = 300


def answers(lost: int, gained: int, num: int) -> Differences:
    sums_K = np.repeat([-1.0, 1.0, 0.0], [lost, gained, num - lost - gained])
    return Differences(sums_K, np.ones(num), np.arange(num).astype(np.str_), largest=1.0)


@cache
def p_of_counts(lost: int, gained: int) -> float:
    return p_worse(answers(lost, gained, lost + gained))


def drawn(num: int, drop: float, discordance: float, seed: int, pairs: int) -> NDArray[np.int64]:
    """Draw lost and gained items of pairs whose accuracies differ by `drop`."""
    shares = [(discordance + drop) / 2, (discordance - drop) / 2, 1 - discordance]
    return np.random.default_rng(seed).multinomial(num, shares, size=pairs)[:, :2]


def show(*cells: object) -> None:
    print("|", " | ".join(str(cell) for cell in cells), "|")  # noqa: T201


@pytest.mark.parametrize("num", SIZES)
@pytest.mark.parametrize("discordance", [0.04, 0.1, 0.2])
def test_comparison_of_answers(num: int, discordance: float) -> None:
    equal, worse = (
        [answers(one[0], one[1], num) for one in drawn(num, drop, discordance, num, NUM_PAIRS)]
        for drop in (0.0, MARGIN)
    )
    false_fails = np.mean([p_worse(one) < NOMINAL for one in equal])
    passes = np.mean([p_not_inferior(one, MARGIN) < NOMINAL for one in equal])
    false_passes = np.mean([p_not_inferior(one, MARGIN) < NOMINAL for one in worse])
    rates = (f"{rate:.1%}" for rate in (false_passes, false_fails, passes))
    show("answers", f"{num:,}", f"{discordance:.0%}", *rates)
    assert false_passes <= NOMINAL + ALLOWED
    # The exact test stays below the nominal rate, because lost items are whole numbers.
    assert false_fails <= NOMINAL


@pytest.mark.parametrize("margin", [0.02, MARGIN, 0.06])
@pytest.mark.parametrize("discordance", [0.01, 0.02, 0.04, 0.1, 0.3])
def test_equal_candidates_pass_with_the_needed_items(margin: float, discordance: float) -> None:
    changed = round(500 * discordance)
    needed = items_needed(answers(changed, changed, 1_000), margin, NOMINAL, POWER)
    counts = drawn(needed, 0.0, discordance, needed, NUM_PAIRS)
    passes = np.mean(
        [p_not_inferior(answers(one[0], one[1], needed), margin) < NOMINAL for one in counts]
    )
    show("needed items", f"{needed:,}", f"{discordance:.0%}", f"{margin:.0%}", f"{passes:.1%}")
    assert POWER - 0.025 <= passes <= POWER + 0.06


@pytest.mark.parametrize("num", SIZES)
def test_comparison_of_clustered_answers(num: int) -> None:
    """Texts of five questions. Half of the questions are lost or gained together."""
    discordance, num = 0.1, num - num % CLUSTER
    clusters = [str(number // CLUSTER) for number in range(num)]
    rng = np.random.default_rng(num)

    def clustered(drop: float) -> Differences:
        shares = [(discordance + drop) / 2, (discordance - drop) / 2, 1 - discordance]
        own = rng.choice([-1.0, 1.0, 0.0], size=num, p=shares)
        shared = np.repeat(rng.choice([-1.0, 1.0, 0.0], size=num // CLUSTER, p=shares), CLUSTER)
        return Differences.of(
            np.where(rng.random(num) < 0.5, own, shared).tolist(), clusters, largest=1.0
        )

    equal, worse = ([clustered(drop) for _ in range(NUM_PAIRS)] for drop in (0.0, MARGIN))
    false_fails = np.mean([p_worse(one) < NOMINAL for one in equal])
    passes = np.mean([p_not_inferior(one, MARGIN) < NOMINAL for one in equal])
    false_passes = np.mean([p_not_inferior(one, MARGIN) < NOMINAL for one in worse])
    rates = (f"{rate:.1%}" for rate in (false_passes, false_fails, passes))
    show(f"answers, clusters of {CLUSTER}", f"{num:,}", f"{discordance:.0%}", *rates)
    assert max(false_passes, false_fails) <= NOMINAL + ALLOWED + (num < SIZES[1]) * ALLOWED


@pytest.mark.parametrize("num", SIZES)
@pytest.mark.parametrize("cluster", [1, CLUSTER])
@pytest.mark.parametrize("changed", [0.01, 0.05, 1.0])
def test_comparison_of_log_probabilities(num: int, cluster: int, changed: float) -> None:
    """Differences with heavy tails, of all items or of a few."""
    num -= num % cluster
    clusters = [str(number // cluster) for number in range(num)]
    rng = np.random.default_rng(num * cluster)

    def differences(drop: float) -> Differences:
        own = rng.standard_t(4, num)
        shared = np.repeat(rng.standard_t(4, num // cluster), cluster)
        values = 0.05 * (own + shared * (cluster > 1)) - drop / changed
        return Differences.of((values * (rng.random(num) < changed)).tolist(), clusters)

    equal, worse = ([differences(drop) for _ in range(NUM_PAIRS)] for drop in (0.0, MARGIN_NATS))
    false_fails = np.mean([p_worse(one) < NOMINAL for one in equal])
    passes = np.mean([p_not_inferior(one, MARGIN_NATS) < NOMINAL for one in equal])
    false_passes = np.mean([p_not_inferior(one, MARGIN_NATS) < NOMINAL for one in worse])
    name = "log-probability" + f", clusters of {cluster}" * (cluster > 1)
    rates = (f"{rate:.1%}" for rate in (false_passes, false_fails, passes))
    show(name, f"{num:,}", f"{changed:.0%}", *rates)
    assert false_fails <= NOMINAL + ALLOWED
    # A sample of few changed items may hold none of them.
    unseen = binom.pmf(0, num, changed)
    assert false_passes <= max(NOMINAL, unseen) + ALLOWED + (changed < 1) * 2 * ALLOWED


@pytest.mark.parametrize("num_tasks", [1, 5, 20, 60])
@pytest.mark.parametrize("num", [50, 200, 2_000])
def test_suites_of_tasks(num_tasks: int, num: int) -> None:
    """Tasks, and the pool of all, next to McNemar's test of each task (Holm) and of the pooled items."""
    methods: dict[str, Callable[[list[float], float], bool]] = {
        "assay": lambda tasks, pool: any(
            p < NOMINAL
            for layer in holm_in_layers(
                [dict(enumerate(tasks)), {0: pool} if num_tasks > 1 else {}]
            )
            for p in layer.values()
        ),
        "each task": lambda tasks, _: min(holm(dict(enumerate(tasks))).values()) < NOMINAL,
        "pooled": lambda _, pool: pool < NOMINAL,
    }
    # Equal; every task 2 points worse; one task 20 points worse.
    cases = [[0.0] * num_tasks, [0.02] * num_tasks, [0.2] + [0.0] * (num_tasks - 1)]
    found: dict[str, list[float]] = {name: [] for name in methods}
    for case, drops in enumerate(cases):
        counts = np.stack(
            [
                drawn(num, drop, max(0.1, drop), 1_000 * case + place, NUM_SUITES)
                for place, drop in enumerate(drops)
            ],
            axis=1,
        )
        p_values = [
            [p_of_counts(int(one[0]), int(one[1])) for one in (*suite, suite.sum(axis=0))]
            for suite in counts
        ]
        for name, fails in methods.items():
            found[name].append(float(np.mean([fails(one[:-1], one[-1]) for one in p_values])))
    totals = drawn(num * num_tasks, 0.0, 0.1, num_tasks, NUM_SUITES)
    pools = [answers(one[0], one[1], num * num_tasks) for one in totals]
    passes = np.mean([p_not_inferior(one, MARGIN) < NOMINAL for one in pools])
    rates = (f"{rate:.0%}" for case in range(3) for rate in (found[name][case] for name in methods))
    show(num_tasks, f"{num:,}", *rates, f"{passes:.0%}")
    assert found["assay"][0] <= NOMINAL + 0.025
    for case in (1, 2):
        assert found["assay"][case] >= max(found["each task"][case], found["pooled"][case]) - 0.2


def test_published_comparison_detects_far_less() -> None:
    """An unpaired z-test over 100 samples, as in lm-eval's scripts/model_comparator.py."""
    rng = np.random.default_rng(0)

    def seen_unpaired(drop: float) -> float:
        base = rng.binomial(100, 0.5, NUM_PAIRS) / 100
        now = rng.binomial(100, 0.5 - drop, NUM_PAIRS) / 100
        errors = np.sqrt((base * (1 - base) + now * (1 - now)) / 99)
        return float(np.mean(2 * norm.sf(np.abs(base - now) / errors) < NOMINAL))

    def seen_paired(drop: float) -> float:
        pairs = drawn(1_319, drop, 0.02, 1, NUM_PAIRS)
        return float(np.mean([p_worse(answers(one[0], one[1], 1_319)) < NOMINAL for one in pairs]))

    unpaired = next(drop for drop in np.arange(0.01, 0.5, 0.01) if seen_unpaired(drop) >= 0.8)
    paired = next(drop for drop in np.arange(0.001, 0.02, 0.001) if seen_paired(drop) >= 0.8)
    show("seen 4 times of 5: unpaired, n = 100", f"{unpaired:.0%}", "paired", f"{paired:.1%}")
    assert unpaired == pytest.approx(0.19, abs=0.02)
    assert paired <= 0.011
