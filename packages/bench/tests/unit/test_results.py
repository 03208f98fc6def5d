import math

from scipy.stats import binom

from assay.verdicts import Outcome
from assay_bench.results import Score, items_to_tell_from_guess, judge_scores
from packages.bench.tests.unit.sample_evaluations import answered, evaluation, item, task


def test_choice_must_be_better_than_a_guess() -> None:
    def judged(num_right: int, chance: float | None) -> Outcome:
        items = answered(num_right, 100).items
        return judge_scores(evaluation(task(items, chance=chance))).verdict

    assert judged(40, 0.25) is Outcome.PASS
    assert judged(28, 0.25) is Outcome.FAIL
    assert judged(1, None) is Outcome.PASS


def test_few_items_are_underpowered() -> None:
    # Three of four right have p = 0.051 under a guess of a quarter.
    verdict = judge_scores(evaluation(task(answered(3, 4).items, chance=0.25)))
    assert verdict.verdict is verdict.levels["sums"].verdict is Outcome.NOT_COMPARED
    reason = str(verdict.levels["sums"].reason)
    assert reason.startswith("underpowered: too few items to tell it from a guess (4 of 58)")
    assert verdict.headline == "underpowered: too few items to decide sums."
    assert judge_scores(evaluation(task(answered(4, 4).items, chance=0.25))).passed


def test_needed_items_detect_20_points_with_power_0_8() -> None:
    # The normal approximation gives 51 for a quarter. The exact test needs more.
    assert 50 < items_to_tell_from_guess(0.25) < 70
    for chance in (0.1, 0.25, 0.5):
        needed = items_to_tell_from_guess(chance)
        right = int(binom.isf(0.01, needed, chance)) + 1
        assert binom.sf(right - 1, needed, chance) < 0.01
        assert binom.sf(right - 1, needed, chance + 0.2) >= 0.8


def test_infinite_likelihood_fails() -> None:
    verdict = judge_scores(evaluation(task([item(0), item(1, log_probability=math.inf)])))
    assert (verdict.verdict, verdict.diagnosis) == (Outcome.FAIL, "non-finite")
    assert verdict.levels["sums"].reason == "1 of 2 log-probabilities are NaN or infinite"


def test_evaluation_without_tasks_is_not_a_pass() -> None:
    assert judge_scores(evaluation()).verdict is Outcome.NOT_COMPARED


def test_task_without_items_is_not_a_pass() -> None:
    few = task(answered(3, 4).items, name="few", chance=0.25)
    verdict = judge_scores(evaluation(task([], name="empty"), few, answered(90, 100)))
    assert verdict.verdict is verdict.levels["empty"].verdict is Outcome.NOT_COMPARED
    assert verdict.headline == "empty, few: not compared."


def test_generated_text_of_a_model_that_gives_nan_fails() -> None:
    verdict = judge_scores(evaluation(task(answered(0, 40).items, num_nan_calls=3)))
    assert (verdict.verdict, verdict.diagnosis) == (Outcome.FAIL, "non-finite")
    assert "NaN or infinity for the next token in 3 calls" in str(verdict.levels["sums"].reason)


def test_task_without_a_right_answer_is_not_judged() -> None:
    nothing, something = answered(0, 40), task(answered(90, 100).items, name="choices", chance=0.25)
    verdict = judge_scores(evaluation(nothing))
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert verdict.headline == "sums: not compared."
    assert "no answer is right" in str(verdict.levels["sums"].reason)
    both = judge_scores(evaluation(nothing, something))
    assert (both.verdict, both.levels["sums"].verdict) == (Outcome.PASS, None)
    assert both.headline == "1 tasks ran; every choice is better than a guess."


def test_only_the_chosen_metric_is_judged() -> None:
    """`acc` is that of a guess; the chosen `acc_norm` is far better."""
    scores = {
        "acc": Score(kind="yes-no", values=(1.0, 0.0, 0.0, 0.0) * 25),
        "acc_norm": Score(kind="yes-no", values=(1.0, 1.0, 1.0, 0.0) * 25),
    }
    items = [item(n, right=n % 4 == 0, log_probability=-1.0) for n in range(100)]
    side = evaluation(task(items, chance=0.25, scores=scores))
    assert judge_scores(side).verdict is Outcome.FAIL
    chosen = judge_scores(side, {"sums": ["acc_norm"]})
    assert chosen.verdict is Outcome.PASS
    assert chosen.notes == ["sums: acc_norm 75.0% (a guess: 25.0%), 100 items"]


def test_nan_fails_also_where_another_metric_is_chosen() -> None:
    items = [item(n, log_probability=math.nan) for n in range(100)]
    scores = {"acc": Score(kind="yes-no", values=(1.0,) * 100)}
    side = evaluation(task(items, scores=scores))
    assert judge_scores(side, {"sums": ["acc"]}).verdict is Outcome.FAIL
