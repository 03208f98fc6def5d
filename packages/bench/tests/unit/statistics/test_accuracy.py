"""Comparison with published examples and with sums over all outcomes."""

from math import comb

import pytest

from assay_bench.statistics.accuracy import (
    PairedAnswers,
    interval,
    p_not_inferior,
    p_worse,
)


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (5, 0), (5, 3), (3, 5), (12, 12)])
def test_p_value_of_lost_items_matches_coin_flips(lost: int, gained: int) -> None:
    n = lost + gained
    exact = sum(comb(n, k) for k in range(lost, n + 1)) / 2**n
    answers = PairedAnswers(lost, gained, 100)
    assert p_worse(answers) == pytest.approx(exact)


def test_score_test_matches_the_published_example() -> None:
    # Tango 1998, table 2: two ways to disinfect lenses, margin 10 %.
    assert p_not_inferior(PairedAnswers(1, 0, 44), 0.1) == pytest.approx(0.0438, abs=5e-5)


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
    assert interval(PairedAnswers(lost, gained, num), 0.95) == pytest.approx(expected, abs=5e-5)


def test_bound_agrees_with_the_test() -> None:
    answers = PairedAnswers(7, 4, 300)
    low, high = interval(answers, 0.9)
    assert p_not_inferior(answers, -low) == pytest.approx(0.05, abs=1e-4)
    assert low < answers.difference < high


def test_few_items_without_losses_are_not_certain() -> None:
    assert p_not_inferior(PairedAnswers(0, 0, 20), 0.02) > 0.2
    assert p_not_inferior(PairedAnswers(0, 0, 200), 0.02) < 0.05


def test_discordant_answers_are_counted() -> None:
    answers = PairedAnswers.of([True, True, False, False], [True, False, True, False])
    assert (answers.lost, answers.gained, answers.num_items) == (1, 1, 4)
    assert (answers.difference, answers.discordance) == (0.0, 0.5)
    with pytest.raises(ValueError, match="zip"):
        PairedAnswers.of([True], [True, False])
