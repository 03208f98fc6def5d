import math
from dataclasses import replace

import pytest

from assay.verdicts import Outcome
from assay_bench.results import Score, TaskResult, judge_scores, measurements_of
from packages.bench.tests.unit.sample_evaluations import answered, evaluation, item, task


def test_choice_must_be_better_than_a_guess() -> None:
    def judged(num_right: int, chance: float | None) -> Outcome:
        items = answered(num_right, 100).items
        return judge_scores(evaluation(task(items, chance=chance))).verdict

    assert judged(40, 0.25) is Outcome.PASS
    assert judged(28, 0.25) is Outcome.FAIL


@pytest.mark.parametrize(
    ("num_right", "num_alike", "outcome"),
    [
        # The answer to 10 of 100 questions is right 10 times of 100; 20 times has p = 0.002, 15 p = 0.07.
        (20, 10, Outcome.PASS),
        (15, 10, None),
        # Each question has its own answer: 5 right ones have p = 0.003.
        (5, 1, Outcome.PASS),
        (100, 100, None),
    ],
)
def test_answers_without_options_must_beat_the_most_frequent_right_answer(
    num_right: int, num_alike: int, outcome: Outcome | None
) -> None:
    items = [
        replace(one, target_hash="often" if n < num_alike else f"t{n}")
        for n, one in enumerate(answered(num_right, 100).items)
    ]
    verdict = judge_scores(evaluation(task(items)))
    assert verdict.levels["sums"].verdict is outcome
    assert verdict.verdict is (outcome or Outcome.NOT_COMPARED)
    assert f"the most frequent right answer, {num_alike}.0% (p = " in str(
        verdict.levels["sums"].reason
    )


def likelihoods(nats: float, guess: float | None, num_items: int = 60) -> TaskResult:
    """A text task: log-probabilities around `nats`, and those of a guess, all in nats per byte."""
    items = [item(n, None, nats + 0.01 * (n % 3)) for n in range(num_items)]
    return task([replace(one, guess=guess) for one in items], name="text")


@pytest.mark.parametrize(
    ("side", "outcome", "reason"),
    [
        (likelihoods(-1.5, -3.0), Outcome.PASS, "better than a guess that knows how often"),
        # Random weights: a little better than log(1/256) = -5.545, and far from the frequencies.
        (likelihoods(-5.53, -3.0), Outcome.NOT_COMPARED, "worse than a guess that knows how often"),
        (likelihoods(-5.60, -3.0), Outcome.FAIL, "worse than a guess of every byte, -5.545 nats"),
        (likelihoods(-1.5, None), None, "not judged, as lm-eval's own files do not hold"),
        # Signs of six items are all positive with probability 1/64.
        (likelihoods(-1.5, -3.0, 6), None, "not judged: not shown to be better"),
    ],
)
def test_text_must_be_more_probable_than_by_frequencies_alone(
    side: TaskResult, outcome: Outcome | None, reason: str
) -> None:
    alone = judge_scores(evaluation(side))
    assert alone.levels["text"].verdict is outcome
    assert str(alone.levels["text"].reason).startswith(reason)
    # A task that no test judged never makes a PASS.
    assert alone.verdict is (outcome or Outcome.NOT_COMPARED)


def test_model_that_is_worse_than_a_guess_in_one_task_does_not_pass() -> None:
    right = task(answered(100, 100).items, chance=0.25)
    verdict = judge_scores(evaluation(right, likelihoods(-4.0, -3.0)))
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert verdict.headline == "Not compared: text."


def test_clusters_of_text_are_one_sign_each() -> None:
    side = likelihoods(-1.5, -3.0)
    items = tuple(replace(one, cluster=f"piece {n % 6}") for n, one in enumerate(side.items))
    assert judge_scores(evaluation(replace(side, items=items))).levels["text"].verdict is None


@pytest.mark.parametrize(
    ("num_right", "num_items", "reason"),
    [
        # Three of four right have p = 0.051 under a guess of a quarter. A model that answers three quarters right
        # is told from it by ((2.326 * 0.433 + 0.842 * 0.433) / 0.5)**2 = 7.5 items.
        (3, 4, "about 8 would (--limit 8) (p = 0.051, must be below 0.01): acc 75.0% (a guess: 25.0%), 4 items"),
        # A guess, told from 45 %: ((2.326 * 0.497 + 0.842 * 0.433) / 0.2)**2 = 57.9.
        (5, 20, "about 58 would (--limit 58) (p = 0.59,"),
        # 35 %, told from 25 %: ((2.326 * 0.433 + 0.842 * 0.477) / 0.1)**2 = 198.8.
        (35, 100, "about 199 would (--limit 199) (p = 0.016,"),
    ],
)  # fmt: skip
def test_choice_that_shows_nothing_is_underpowered(
    num_right: int, num_items: int, reason: str
) -> None:
    side = task(answered(num_right, num_items).items, chance=0.25)
    verdict = judge_scores(evaluation(side))
    assert verdict.verdict is verdict.levels["sums"].verdict is Outcome.NOT_COMPARED
    told = str(verdict.levels["sums"].reason)
    expected = (
        f"underpowered: {num_items} items neither show an advantage over a guess nor exclude one of 20 points;"
        f" {reason}"
    )
    assert told.startswith(expected)
    assert verdict.headline == "underpowered: too few items to decide sums."
    small = judge_scores(evaluation(replace(side, num_documents=num_items)))
    assert f", but the task has only {num_items} documents: add documents (p" in str(
        small.levels["sums"].reason
    )


def test_excluded_advantage_over_a_guess_fails() -> None:
    # P(X <= 33) = 0.0098 if 45 % of 100 were right, and P(X <= 34) = 0.0158.
    verdict = judge_scores(evaluation(task(answered(33, 100).items, chance=0.25)))
    assert str(verdict.levels["sums"].reason).startswith(
        "no better than a guess: an advantage of 20 points is excluded (p = 0.0098): acc 33.0%"
    )
    undecided = judge_scores(evaluation(task(answered(34, 100).items, chance=0.25)))
    assert undecided.verdict is Outcome.NOT_COMPARED


def test_infinite_likelihood_fails() -> None:
    verdict = judge_scores(evaluation(task([item(0), item(1, log_probability=math.inf)])))
    assert (verdict.verdict, verdict.diagnosis) == (Outcome.FAIL, "non-finite")
    assert verdict.levels["sums"].reason == "NaN or infinite: 1 of 2 log-probabilities"


def test_evaluation_without_tasks_is_not_a_pass() -> None:
    assert judge_scores(evaluation()).verdict is Outcome.NOT_COMPARED


def test_task_without_items_is_not_a_pass() -> None:
    few = task(answered(3, 4).items, name="few", chance=0.25)
    verdict = judge_scores(evaluation(task([], name="empty"), few, answered(90, 100)))
    assert verdict.verdict is verdict.levels["empty"].verdict is Outcome.NOT_COMPARED
    assert verdict.headline == "Not compared: empty, few."


def test_generated_text_of_a_model_that_gives_nan_fails() -> None:
    verdict = judge_scores(evaluation(task(answered(0, 40).items, num_nan_calls=3)))
    assert (verdict.verdict, verdict.diagnosis) == (Outcome.FAIL, "non-finite")
    assert "NaN or infinity for the next token in 3 calls" in str(verdict.levels["sums"].reason)
    side = task(answered(0, 40).items, num_nan_calls=1, nan_weights=("a.weight", "b.weight"))
    assert judge_scores(evaluation(side)).levels["sums"].reason == (
        "the model gave NaN or infinity for the next token in 1 call; NaN or infinity is in the weights a.weight,"
        " b.weight"
    )


def test_task_without_a_right_answer_is_not_judged() -> None:
    nothing, something = answered(0, 40), task(answered(90, 100).items, name="choices", chance=0.25)
    verdict = judge_scores(evaluation(nothing))
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert verdict.headline == "No task was judged."
    assert "no answer is right" in str(verdict.levels["sums"].reason)
    both = judge_scores(evaluation(nothing, something))
    assert (both.verdict, both.levels["sums"].verdict) == (Outcome.PASS, None)
    assert both.headline == "Better than a guess: choices; not judged: sums."


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
    assert chosen.notes == [
        "sums: better than a guess (p = 1.4e-25): acc_norm 75.0% (a guess: 25.0%), 100 items"
    ]


def test_scores_and_those_of_a_guess_are_measurements() -> None:
    choices = task(answered(90, 100).items, name="choices", chance=0.25)
    rows = measurements_of(evaluation(choices, likelihoods(-1.5, -3.0), answered(9, 10)))
    found = [(row.level, row.statistic, row.actual, row.expected) for row in rows]
    assert found == [
        ("choices", "acc", 0.9, 0.25),
        ("text", "log-probability", pytest.approx(-1.49), pytest.approx(-3.0)),
    ]


def test_nan_fails_also_where_another_metric_is_chosen() -> None:
    items = [item(n, log_probability=math.nan) for n in range(100)]
    scores = {"acc": Score(kind="yes-no", values=(1.0,) * 100)}
    side = evaluation(task(items, scores=scores))
    assert judge_scores(side, {"sums": ["acc"]}).verdict is Outcome.FAIL


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"do_sample": False}, None),
        ({"do_sample": False, "temperature": 0.0}, None),
        ({"do_sample": True, "temperature": 0.7}, None),
        ({"temperature": 0.7}, None),  # lm-eval samples
        (
            {"do_sample": False, "temperature": 0.7, "top_p": 0.9},
            "sums: temperature=0.7, top_p=0.9 has no effect (assay's loader, hf, vllm), because do_sample is False: set --gen-kwargs do_sample=True",
        ),
    ],
)
def test_settings_of_sampling_without_effect_are_named(
    settings: dict[str, object], told: str | None
) -> None:
    answers = answered(40, 100)
    asked = replace(answers, asked={"generation_kwargs": settings})
    notes = judge_scores(evaluation(asked)).notes
    assert [note for note in notes if "no effect" in note] == ([told] if told else [])
