import math

from assay.verdicts import Outcome
from assay_bench.evaluations.scores import judge_scores
from packages.bench.tests.unit.made import answered, evaluation, item, task


def test_a_choice_has_to_be_better_than_a_guess() -> None:
    def judged(num_right: int, chance: float | None) -> Outcome:
        items = answered(num_right, 100).items
        return judge_scores(evaluation(task(items, chance=chance))).verdict

    assert judged(40, 0.25) is Outcome.PASS
    assert judged(28, 0.25) is Outcome.FAIL
    assert judged(0, None) is Outcome.PASS


def test_what_is_no_number_fails() -> None:
    verdict = judge_scores(evaluation(task([item(0), item(1, log_probability=math.inf)])))
    assert (verdict.verdict, verdict.diagnosis) == (Outcome.FAIL, "non-finite")
    assert verdict.levels["sums"].reason == "1 of 2 log-probabilities are NaN or infinite"


def test_no_task_is_no_pass() -> None:
    assert judge_scores(evaluation()).verdict is Outcome.NOT_COMPARED
