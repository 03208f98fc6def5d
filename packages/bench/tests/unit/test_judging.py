import pytest

from assay.verdicts import Outcome
from assay_bench.judging import judge_change, judge_score, paired_test
from assay_bench.results import BenchResult


def result(right: list[bool], **changes: object) -> BenchResult:
    score = sum(right) / len(right) if right else 0.0
    record: dict[str, object] = {
        "schema": 1,
        "task": "next-text",
        "task_hash": "t",
        "model": "micro:llama",
        "weights_hash": "w",
        "tokenizer_hash": "b",
        "run": "cpu/float32",
        "metric": "acc",
        "score": score,
        "standard_error": 0.05,
        "chance": 0.25,
        "right": right,
        "versions": {},
    }
    return BenchResult.model_validate(record | changes)


def answers(num_right: int, num: int) -> list[bool]:
    return [number < num_right for number in range(num)]


def test_the_paired_test_counts_what_only_one_side_got_right() -> None:
    test = paired_test([True, True, True, False, False], [True, False, False, True, False])
    assert (test.lost, test.gained, test.num_documents) == (2, 1, 5)
    # Of three coins, two or three heads: 4 of 8; one, two or three: 7 of 8.
    assert test.p_lower == pytest.approx(4 / 8)
    assert test.p_higher == pytest.approx(7 / 8)
    # Seven losses without a gain have a probability of 1 / 128, six of 1 / 64 > 0.01.
    assert test.resolution == pytest.approx(7 / 5)


def test_equal_answers_are_never_significant() -> None:
    test = paired_test([True, False], [True, False])
    assert (test.p_lower, test.p_higher) == (1.0, 1.0)


@pytest.mark.parametrize(("lost", "outcome"), [(6, Outcome.PASS), (7, Outcome.FAIL)])
def test_seven_losses_without_a_gain_are_significant(lost: int, outcome: Outcome) -> None:
    verdict, _ = judge_change(result(answers(50, 100)), result(answers(50 - lost, 100)))
    assert verdict.verdict is outcome
    assert verdict.compared == 100


def test_a_change_is_said_in_words() -> None:
    verdict, _ = judge_change(result(answers(50, 100)), result(answers(43, 100)))
    assert verdict.levels["score"].reason == (
        "7 documents lost and 0 gained of 100 (p = 0.0078 for lower, 1 for higher)"
    )
    assert verdict.notes == [
        "expected: micro:llama on cpu/float32: acc 0.500 ± 0.050 on 100 documents of next-text",
        "actual: micro:llama on cpu/float32: acc 0.430 ± 0.050 on 100 documents of next-text",
        "7 documents lost and 0 gained of 100 (p = 0.0078 for lower, 1 for higher)",
        "a drop of less than 0.070 could not have been seen",
    ]


def test_a_better_model_passes() -> None:
    verdict, _ = judge_change(result(answers(50, 100)), result(answers(90, 100)))
    assert verdict.verdict is Outcome.PASS


def test_the_same_score_by_other_documents_is_no_change_of_the_score() -> None:
    swapped = list(reversed(answers(50, 100)))
    verdict, _ = judge_change(result(answers(50, 100)), result(swapped))
    assert verdict.verdict is Outcome.PASS


@pytest.mark.parametrize("change", [{"task_hash": "other"}, {"metric": "acc_norm"}])
def test_answers_to_other_questions_are_not_compared(change: dict[str, object]) -> None:
    verdict, rows = judge_change(result(answers(9, 10)), result(answers(1, 10), **change))
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert verdict.unmatched.expected == ["next-text"]
    assert rows == []


def test_nothing_compared_is_not_a_pass() -> None:
    assert judge_change(result([]), result([]))[0].verdict is Outcome.NOT_COMPARED
    assert judge_score(result([], score=float("nan")))[0].verdict is Outcome.NOT_COMPARED


@pytest.mark.parametrize(
    ("num_right", "outcome"),
    # Of 4 with a chance of 1/4: all right 1/256 < 0.01, three or more 13/256.
    [(4, Outcome.PASS), (3, Outcome.FAIL), (0, Outcome.FAIL)],
)
def test_a_score_has_to_be_more_than_a_guess(num_right: int, outcome: Outcome) -> None:
    verdict, _ = judge_score(result(answers(num_right, 4)))
    assert verdict.verdict is outcome
    assert verdict.compared == 4


def test_a_guess_is_said_in_words() -> None:
    verdict, _ = judge_score(result(answers(3, 4)))
    assert verdict.levels["score"].reason == (
        "no better than a guess (p = 0.051): micro:llama on cpu/float32: acc 0.750 ± 0.050"
        " on 4 documents of next-text, guessing gives 0.250"
    )


def test_nan_fails_whatever_the_score() -> None:
    perfect = result(answers(100, 100), num_non_finite=1)
    for verdict, _ in (judge_score(perfect), judge_change(result(answers(9, 100)), perfect)):
        assert verdict.verdict is Outcome.FAIL
        assert verdict.diagnosis == "non-finite"


def test_a_baseline_full_of_nan_is_no_baseline() -> None:
    baseline = result(answers(0, 100), num_non_finite=400)
    verdict, rows = judge_change(baseline, result(answers(90, 100)))
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert verdict.levels["score"].reason == "400 log-likelihoods of the expected side are NaN"
    assert verdict.diagnosis is None
    assert verdict.unmatched.expected == ["next-text"]
    assert rows == []


def test_nan_on_both_sides_is_a_failure_of_the_later_run() -> None:
    full_of_nan = result(answers(0, 100), num_non_finite=400)
    verdict, _ = judge_change(full_of_nan, full_of_nan)
    assert verdict.verdict is Outcome.FAIL
    assert verdict.diagnosis == "non-finite"
