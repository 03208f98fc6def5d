import math

from scipy.stats import binom

from assay.verdicts import Outcome
from assay_bench.evaluations.scores import items_to_tell_from_guess, judge_scores
from packages.bench.tests.unit.made import answered, evaluation, item, task


def test_a_choice_has_to_be_better_than_a_guess() -> None:
    def judged(num_right: int, chance: float | None) -> Outcome:
        items = answered(num_right, 100).items
        return judge_scores(evaluation(task(items, chance=chance))).verdict

    assert judged(40, 0.25) is Outcome.PASS
    assert judged(28, 0.25) is Outcome.FAIL
    assert judged(0, None) is Outcome.PASS


def test_few_items_do_not_tell_a_model_from_a_guess() -> None:
    # Three of four right have p = 0.051 under a guess of a quarter.
    verdict = judge_scores(evaluation(task(answered(3, 4).items, chance=0.25)))
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert "too few items to tell it from a guess (4 of 58)" in (
        verdict.levels["sums"].reason or ""
    )
    assert verdict.headline == "sums: not compared."
    assert judge_scores(evaluation(task(answered(4, 4).items, chance=0.25))).passed


def test_as_many_items_are_needed_as_tell_20_points_four_times_of_five() -> None:
    # By the normal approximation 51 for a quarter: exact tests need some more.
    assert 50 < items_to_tell_from_guess(0.25) < 70
    for chance in (0.1, 0.25, 0.5):
        needed = items_to_tell_from_guess(chance)
        right = int(binom.isf(0.01, needed, chance)) + 1
        assert binom.sf(right - 1, needed, chance) < 0.01
        assert binom.sf(right - 1, needed, chance + 0.2) >= 0.8


def test_what_is_no_number_fails() -> None:
    verdict = judge_scores(evaluation(task([item(0), item(1, log_probability=math.inf)])))
    assert (verdict.verdict, verdict.diagnosis) == (Outcome.FAIL, "non-finite")
    assert verdict.levels["sums"].reason == "1 of 2 log-probabilities are NaN or infinite"


def test_no_task_is_no_pass() -> None:
    assert judge_scores(evaluation()).verdict is Outcome.NOT_COMPARED
