"""Pairs, PASS, FAIL and NOT_COMPARED of two evaluations, computed by hand."""

import math
import random
import re
from collections import Counter
from dataclasses import replace

import pytest

from assay.errors import UsageError
from assay.judge.explain import explain_verdict, find_deciding_rows
from assay.verdicts import Outcome
from assay_bench.comparing import (
    EvaluationComparison,
    Terms,
    compare,
    pairs_of,
)
from assay_bench.comparison_files import (
    comparison_as_markdown,
    measure_in_words,
    verdict_of,
)
from assay_bench.results import Evaluation, Score, TaskResult
from packages.bench.tests.unit.sample_evaluations import answered, evaluation, item, task

TERMS = Terms(accuracy=0.02, log_probability=0.01)


def judged(base: TaskResult, candidate: TaskResult) -> Outcome:
    return compare(evaluation(base), evaluation(candidate), TERMS).judged


@pytest.mark.parametrize(
    ("num_lost", "num_items", "expected"),
    [
        (0, 400, Outcome.PASS),
        (0, 100, Outcome.NOT_COMPARED),  # 133 items would exclude 2 %
        (6, 400, Outcome.FAIL),  # p of six heads of six: 1.6 %
        (4, 400, Outcome.NOT_COMPARED),  # p = 6 %
        (4, 4000, Outcome.PASS),
    ],
)
def test_outcome_depends_on_the_number_of_lost_items(
    num_lost: int, num_items: int, expected: Outcome
) -> None:
    base, candidate = answered(num_items, num_items), answered(num_items - num_lost, num_items)
    assert judged(base, candidate) is expected


def with_log_probabilities(values: list[float]) -> TaskResult:
    return task([item(n, right=None, log_probability=v) for n, v in enumerate(values)])


@pytest.mark.parametrize(
    ("drop", "expected"),
    [(0.0, Outcome.PASS), (0.005, Outcome.PASS), (0.0095, Outcome.FAIL)],
)
def test_log_probabilities_detect_drops_without_lost_answers(
    drop: float, expected: Outcome
) -> None:
    base = [-1 + 0.1 * math.sin(n) for n in range(300)]
    now = [value - drop + 0.02 * math.cos(7 * n) for n, value in enumerate(base)]
    assert judged(with_log_probabilities(base), with_log_probabilities(now)) is expected


def test_underpowered_reports_the_needed_items() -> None:
    found = compare(evaluation(answered(100, 100)), evaluation(answered(100, 100)), TERMS)
    (measure,) = found.tasks[0].measures
    # (1.645 * sqrt(0.02 * 0.98) + 1.282 * sqrt(1 / 100))² / 0.02²
    assert measure.items_needed == 322
    verdict = verdict_of(found)
    assert verdict.verdict is verdict.levels["sums"].verdict is Outcome.NOT_COMPARED
    told = "100 items cannot exclude a drop of 2 points, about 322 would"
    values = "acc 100.0% -> 100.0%, +0.0 points (90% interval -2.6 to +2.6)"
    assert verdict.levels["sums"].reason == f"underpowered: {values}: {told}"
    assert str(verdict.headline).endswith("run both sides with --limit 322.")
    assert verdict.next_steps == []


def test_certain_drop_passes_if_a_drop_of_the_margin_is_excluded() -> None:
    """30 of 8,000 are lost, 0.4 points: p = 0.5^30 for a drop, and more than 0.6 points are excluded."""
    sides = evaluation(answered(8_000, 8_000)), evaluation(answered(7_970, 8_000))
    for margin, expected in ((0.02, Outcome.PASS), (0.006, Outcome.PASS), (0.004, Outcome.FAIL)):
        found = compare(*sides, Terms(accuracy=margin))
        (measure,) = found.tasks[0].measures
        assert measure.p_worse == pytest.approx(0.5**30)
        assert found.judged is measure.judged is expected


def simulated(rng: random.Random) -> EvaluationComparison:
    """Compare answers and log-probabilities, which change by chance and by a drop, with any margins."""
    num, size = rng.choice([2, 3, 10, 60, 200, 400]), rng.choice([1, 5])
    changed, drop, noise = (
        rng.choice([0.0, 0.02, 0.2]),
        rng.gauss(0, 0.01),
        rng.choice([0, 0.01, 0.1]),
    )
    base, candidate = [], []
    for number in range(num):
        right, value = rng.random() < 0.7, rng.gauss(-1, 0.1)
        now = rng.random() < 0.5 if rng.random() < changed else right
        base.append(item(number, right, value, f"{number // size}"))
        changed_value = value + rng.gauss(0, noise) - drop
        candidate.append(item(number, now, changed_value, f"{number // size}"))
    terms = Terms(
        accuracy=rng.choice([0.02, 0.1, 0.3]),
        log_probability=rng.choice([0.003, 0.01, 0.03]),
    )
    return compare(evaluation(task(base)), evaluation(task(candidate)), terms)


def test_no_smaller_number_of_items_is_said_to_suffice() -> None:
    rng = random.Random(4)  # noqa: S311 - reproducible
    told: Counter[str] = Counter()
    for _ in range(400):
        for measure in simulated(rng).tasks[0].measures:
            asked = re.search(
                r"([\d,]+) items (?:in [\d,]+ clusters )?cannot", measure_in_words(measure)
            )
            enough = re.search(r"about ([\d,]+)", measure_in_words(measure))
            assert (asked is not None) is (measure.judged is Outcome.NOT_COMPARED)
            assert (enough is not None) is (measure.items_needed is not None)
            if asked and enough:
                assert int(enough[1].replace(",", "")) > int(asked[1].replace(",", ""))
            if asked:
                told[f"{measure.kind}, {'more' if enough else 'these'} would"] += 1
    kinds = ("yes-no", "nats per byte")
    assert set(told) == {f"{kind}, {which} would" for kind in kinds for which in ("more", "these")}


def test_underpowered_pool_forbids_pass() -> None:
    found = compare(evaluation(answered(300, 400)), evaluation(answered(380, 400)), TERMS)
    few = compare(evaluation(answered(100, 100)), evaluation(answered(99, 100)), TERMS)
    pooled = replace(found, pools=(replace(few.tasks[0], name="all"),))
    assert pooled.judged is verdict_of(pooled).verdict is Outcome.NOT_COMPARED
    assert verdict_of(pooled).headline == "underpowered: too few items to decide."
    nothing = replace(found.tasks[0], judged=Outcome.NOT_COMPARED, problem="not asked")
    assert verdict_of(replace(pooled, tasks=(nothing,))).headline == "Not compared: all, sums."


def test_suspiciously_good_candidate_passes_with_a_note() -> None:
    found = compare(evaluation(answered(300, 400)), evaluation(answered(380, 400)), TERMS)
    verdict = verdict_of(found)
    assert verdict.verdict is Outcome.PASS
    assert verdict.notes[0].endswith(
        "higher by more than 2 points: did the training data contain the questions?"
    )


def test_one_chance_drop_among_many_tasks_does_not_fail() -> None:
    def named(name: str, num_right: int) -> TaskResult:
        return replace(answered(num_right, 4000), name=name)

    base = evaluation(*[named(f"t{n}", 4000) for n in range(12)])
    one_lower = evaluation(*[named(f"t{n}", 4000 - 6 * (n == 3)) for n in range(12)])
    # As a single task it fails: p = 1/64 is below 5 %.
    assert compare(base, one_lower, Terms(accuracy=0.0005)).judged is not Outcome.FAIL


def test_nan_of_the_candidate_fails_and_nan_of_the_base_is_not_compared() -> None:
    good, bad = with_log_probabilities([-1.0] * 9), with_log_probabilities([-1.0] * 8 + [math.nan])
    failed = compare(evaluation(good), evaluation(bad), TERMS)
    verdict = verdict_of(failed)
    assert (verdict.verdict, verdict.diagnosis) == (Outcome.FAIL, "non-finite")
    assert "NaN or infinite: 1 of 9 log-probabilities of the candidate" in str(
        verdict.levels["sums"].reason
    )
    assert judged(bad, good) is Outcome.NOT_COMPARED


def test_task_without_measures_is_not_a_pass() -> None:
    nothing = task([item(n, right=None) for n in range(500)])
    assert judged(nothing, nothing) is Outcome.NOT_COMPARED
    assert compare(evaluation(), evaluation(), TERMS).judged is Outcome.NOT_COMPARED


def test_markdown_shows_lost_items_with_their_texts() -> None:
    text = comparison_as_markdown(
        compare(evaluation(answered(400, 400)), evaluation(answered(390, 400)), TERMS)
    )
    assert text.startswith("### FAIL: model compared with model\n")
    assert "#### sums: 10 lost" in text
    assert "- `390+1=`, right: `391`, base: `391`, candidate: `?`" in text
    assert text.count("candidate: `?`") == 10


def test_lost_items_of_a_baseline_have_the_texts_of_the_candidate() -> None:
    kept = answered(400, 400)
    items = tuple(replace(one, question="", target="", answer="") for one in kept.items)
    base = replace(kept, items=items)
    text = comparison_as_markdown(compare(evaluation(base), evaluation(answered(390, 400)), TERMS))
    assert "- `390+1=`, right: `391`, candidate: `?`" in text


def suite(num_tasks: int, num_lost: int, num_items: int = 50, num_right: int = 40) -> Evaluation:
    """Tasks of their own documents, each with this many lost items."""
    return evaluation(
        *(
            task(
                [
                    replace(item(n, right=num_lost <= n < num_right), key=f"{number}-{n}")
                    for n in range(num_items)
                ],
                name=f"t{number}",
            )
            for number in range(num_tasks)
        )
    )


def test_drop_too_small_for_each_of_many_tasks_fails_together() -> None:
    found = compare(suite(20, 0), suite(20, 4), TERMS)
    assert found.judged is Outcome.FAIL
    assert {one.judged for one in found.tasks} == {Outcome.NOT_COMPARED}
    (pool,) = found.pools
    (measure,) = pool.measures
    assert (pool.name, measure.num_items) == ("all tasks", 1_000)
    assert measure.p_worse == pytest.approx(2 * 0.5**80)  # the pool has half of the significance


def test_tasks_too_small_to_decide_alone_pass_together() -> None:
    found = compare(suite(20, 0), suite(20, 0), TERMS)
    assert found.judged is Outcome.PASS
    verdict = verdict_of(found)
    assert verdict.verdict is Outcome.PASS
    assert verdict.compared == 1_000
    assert verdict.levels["t3"].reason is None
    assert [note for note in verdict.notes if "underpowered" in note] == []
    assert "20 tasks too small to decide alone: the pool of all tasks decides" in verdict.notes
    # Two tasks are 100 items, and 133 would exclude 2 %.
    assert compare(suite(2, 0), suite(2, 0), TERMS).judged is Outcome.NOT_COMPARED


@pytest.mark.parametrize(
    ("num_lost", "expected"),
    [
        (16, Outcome.FAIL),  # p = 1.5e-5, 1.8e-3 corrected
        (10, Outcome.NOT_COMPARED),  # p = 1e-3: 0.06 among 60 tasks
        (3, Outcome.PASS),  # p = 1/8, as one in eight tasks of an equal model
    ],
)
def test_pool_does_not_hide_a_drop_of_one_task(num_lost: int, expected: Outcome) -> None:
    base = suite(60, 0)
    lost = suite(60, num_lost).tasks["t7"]
    found = compare(base, replace(base, tasks=base.tasks | {"t7": lost}), TERMS)
    assert found.judged is expected


def test_large_task_does_not_dilute_a_drop_of_small_ones_of_a_group() -> None:
    large = replace(answered(4_000, 8_000), name="large")
    turned = [
        replace(one, right=not one.right) if n % 8 == 0 else one
        for n, one in enumerate(large.items)
    ]
    small, worse = suite(5, 0), suite(5, 3)
    base = replace(
        small, tasks=small.tasks | {"large": large}, groups={"small": tuple(small.tasks)}
    )
    now = worse.tasks | {"large": replace(large, items=tuple(turned))}
    found = compare(base, replace(base, tasks=now), TERMS)
    assert found.judged is Outcome.FAIL
    assert {pool.name: pool.judged for pool in found.pools} == {
        "group small": Outcome.FAIL,
        "all tasks": Outcome.PASS,
    }


def test_filters_of_one_task_count_its_documents_once() -> None:
    # Four lost documents, each by two filters: p = 1/16, not 1/256.
    sides = [
        evaluation(*(replace(answered(num, 100), name=f"sums ({f})") for f in ("a", "b")))
        for num in (100, 96)
    ]
    (pool,) = compare(sides[0], sides[1], TERMS).pools
    assert pool.measures[0].p_worse == pytest.approx(2 / 16)


def test_lower_is_better_where_the_task_says_so() -> None:
    def rated(num: int) -> TaskResult:
        values = tuple(float(n < num) for n in range(400))
        rate = Score(kind="yes-no", values=values, higher_is_better=False)
        return replace(answered(400, 400), scores={"refusal_rate": rate})

    assert judged(rated(40), rated(160)) is Outcome.FAIL
    assert judged(rated(160), rated(40)) is Outcome.PASS
    text = verdict_of(compare(evaluation(rated(40)), evaluation(rated(160)), TERMS)).to_json()
    assert "+30.0 points (90% interval +26.4 to +33.9)" in text
    assert "higher by more than chance" in text


def test_next_token_that_is_nan_is_a_failure_of_the_candidate() -> None:
    good = answered(400, 400)
    assert judged(good, replace(good, num_nan_calls=1)) is Outcome.FAIL
    assert judged(replace(good, num_nan_calls=1), good) is Outcome.NOT_COMPARED


BASE = answered(5, 10)


def changed(number: int, **update: str) -> TaskResult:
    items = [replace(one, **update) if n == number else one for n, one in enumerate(BASE.items)]  # type: ignore[arg-type]
    return replace(BASE, items=tuple(items))


@pytest.mark.parametrize(
    ("candidate", "told"),
    [
        (replace(BASE, asked=BASE.asked | {"fewshot": 5}), "fewshot is 5, base 0"),
        (replace(BASE, asked=BASE.asked | {"version": 2.0}), "version is 2.0, base 1.0"),
        (changed(3, prompt_hash="other"), "1 of 10 prompts differ"),
        (changed(3, target_hash="other"), "1 of 10 right answers differ"),
        (
            replace(BASE, items=BASE.items[:-2]),
            "2 of the base's 10 documents are missing from the candidate",
        ),
        (
            task([*BASE.items, item(99)]),
            "1 of the candidate's 11 documents are missing from the base",
        ),
    ],
)
def test_different_questions_are_named_and_not_compared(candidate: TaskResult, told: str) -> None:
    found = compare(evaluation(BASE), evaluation(candidate), Terms())
    assert found.judged is Outcome.NOT_COMPARED
    (one,) = found.tasks
    step = "evaluate the base again with the settings of the candidate, and compare with that"
    if "documents" in told:
        fewer, more = ("candidate", "base") if "base's" in told else ("base", "candidate")
        step = f"evaluate the {fewer} on all documents of the {more}"
    assert one.problem == f"the two sides answered different questions: {told}"
    assert one.next_step == step
    assert [str(one) for one in verdict_of(found).next_steps] == [f"sums: {step}"]


def test_edited_documents_are_not_blamed_on_missing_ones() -> None:
    (one,) = compare(evaluation(BASE), evaluation(changed(3, key="edited")), Terms()).tasks
    assert str(one.problem).endswith(
        "; the documents themselves differ: were texts or labels edited?"
    )


def test_a_recorded_limit_is_the_reason_of_missing_documents() -> None:
    limited = replace(BASE, items=BASE.items[:5], num_documents=10)
    (one,) = compare(evaluation(BASE), evaluation(limited), Terms()).tasks
    assert str(one.problem).endswith("5 of the base's 10 documents are missing from the candidate")
    assert one.next_step == "run both sides with the same --limit"


def test_other_questions_of_one_task_leave_the_others_judged() -> None:
    same, worse = replace(MANY, name="same"), replace(MANY, name="worse")
    other = replace(BASE, asked=BASE.asked | {"fewshot": 5})
    dropped = replace(answered(300, 400), name="worse")
    found = compare(evaluation(BASE, same, worse), evaluation(other, same, dropped), TERMS)
    assert {one.name: one.judged for one in found.tasks} == {
        "sums": Outcome.NOT_COMPARED,
        "same": Outcome.PASS,
        "worse": Outcome.FAIL,
    }
    passing = compare(evaluation(BASE, same), evaluation(other, same), TERMS)
    verdict = verdict_of(passing)
    assert passing.judged is verdict.verdict is Outcome.NOT_COMPARED
    assert (verdict.compared, verdict.unmatched.expected) == (400, [])


def test_another_chat_template_refuses_every_task() -> None:
    base = evaluation(BASE, replace(BASE, name="mmlu"))
    verdict = verdict_of(compare(base, replace(base, asked={"chat_template_sha": "1"}), TERMS))
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert explain_verdict(verdict, find_deciding_rows(verdict, [])).message.splitlines() == [
        "Not compared: sums, mmlu.",
        "  sums, mmlu: the two sides answered different questions: chat_template_sha is '1', base None",
        "Next: sums, mmlu: evaluate the base again with the settings of the candidate, and compare with that",
    ]


LONG = "0123456789" * 9


@pytest.mark.parametrize(
    ("candidate", "base", "told"),
    [
        ("Q: {{q}} A:", "Q: {{q}}\nA:", r"'Q: {{q}} A:', base 'Q: {{q}}\nA:'"),
        ("Q: {{q}} ", "Q: {{q}}", "'Q: {{q}} ', base 'Q: {{q}}'"),
        (None, "", "None, base ''"),
        # 20 characters before the first different one, of at most 60.
        (f"{LONG} {LONG}", f"{LONG}\n", rf"...{LONG[:20]} {LONG[:39]}..., base ...{LONG[:20]}\n'"),
    ],
)
def test_settings_that_differ_are_shown_as_they_are_where_they_differ(
    candidate: str | None, base: str, told: str
) -> None:
    sides = [
        evaluation(replace(BASE, asked={"doc_to_text": text, "version": 1}))
        for text in (base, candidate)
    ]
    reason = verdict_of(compare(sides[0], sides[1], TERMS)).levels["sums"].reason
    assert reason == f"the two sides answered different questions: doc_to_text is {told}"


def test_a_task_without_a_common_metric_has_no_advice_to_choose_one() -> None:
    base = with_both_metrics(300, 300, "sums (a b)")
    only_acc = replace(base, scores={"acc": base.scores["acc"]})
    found = compare(evaluation(base), evaluation(only_acc), TERMS)
    assert found.tasks[0].next_step == "judge a metric of both sides: --metric 'sums (a b)=acc'"
    other = replace(base, scores={"f1": base.scores["acc"]})
    found = compare(evaluation(base), evaluation(other), TERMS)
    assert found.tasks[0].next_step == (
        "no metric is on both sides: evaluate both with the same metrics"
    )


def test_task_without_a_right_answer_of_the_base_is_not_judged() -> None:
    nothing = replace(answered(0, 400), name="addition")
    alone = compare(evaluation(nothing), evaluation(nothing), TERMS)
    assert (alone.judged, alone.tasks) == (Outcome.NOT_COMPARED, ())
    assert verdict_of(alone).verdict is Outcome.NOT_COMPARED
    both = evaluation(nothing, MANY)
    found = compare(both, both, TERMS)
    verdict = verdict_of(found)
    told = "acc is not judged: no answer of the base is right, which shows nothing"
    assert (verdict.verdict, verdict.compared) == (Outcome.PASS, 400)
    assert verdict.levels["addition"].outcome_in_words == "not judged"
    assert verdict.levels["addition"].reason == told


def test_metric_without_a_right_answer_is_noted_next_to_log_probabilities() -> None:
    items = [item(n, right=False, log_probability=-1.0) for n in range(400)]
    found = compare(evaluation(task(items)), evaluation(task(items)), TERMS)
    assert [one.name for one in found.tasks[0].measures] == ["log-probability"]
    told = "sums: acc is not judged: no answer of the base is right, which shows nothing"
    assert found.notes == (told,)


def test_advice_for_tasks_with_too_few_documents_is_given_once() -> None:
    tasks = [
        replace(answered(15, 15), name=f"t{number}", num_documents=60 + number)
        for number in range(5)
    ]
    found = compare(evaluation(*tasks), evaluation(*tasks), TERMS)
    (step,) = verdict_of(found).next_steps
    assert str(step) == (
        "t0, t1, t2 and 2 more: add documents or widen the margin: the task has fewer than needed"
    )
    (measure,) = found.tasks[0].measures
    # (1.645 * sqrt(0.02 * 0.98) + 1.282 * sqrt(1 / 15))² / 0.02²
    assert measure_in_words(measure).endswith(
        "15 items cannot exclude a drop of 2 points, about 788 distinct documents would, but the task has 60"
    )
    assert all(
        one.reason is None or "; " not in one.reason for one in verdict_of(found).levels.values()
    )


def test_undecided_task_is_one_clause_that_names_its_other_measures() -> None:
    side = evaluation(with_both_metrics(100, 100, "sums", 100))
    (reason,) = {one.reason for one in verdict_of(compare(side, side, TERMS)).levels.values()}
    assert str(reason).startswith("underpowered: acc 100.0% -> 100.0%")
    assert str(reason).endswith("about 322 would (also undecided: acc_norm)")


def test_significant_drop_within_the_margin_is_in_the_headline() -> None:
    sides = evaluation(answered(8_000, 8_000)), evaluation(answered(7_970, 8_000))
    verdict = verdict_of(compare(*sides, TERMS))
    assert verdict.verdict is Outcome.PASS
    assert str(verdict.headline).endswith(
        " Worse by more than chance, within the margin: sums acc."
    )
    (note,) = verdict.notes
    told = "lower by more than chance (p = 9.3e-10), but a drop of 2 points is excluded"
    assert note.endswith(told)
    # An equal candidate, and a better one, are not worse.
    for pair in ((sides[0], sides[0]), sides[::-1]):
        assert "Worse" not in str(verdict_of(compare(*pair, TERMS)).headline)


def test_passing_tasks_of_a_passing_pool_have_no_note_of_their_own() -> None:
    side = suite(60, num_lost=0, num_items=400)
    notes = verdict_of(compare(side, side, TERMS)).notes
    assert [note.partition(":")[0] for note in notes] == ["all tasks"]


def test_failure_of_a_second_metric_names_its_lost_items() -> None:
    base, worse = with_both_metrics(300, 300), with_both_metrics(300, 200)
    found = compare(evaluation(base), evaluation(worse), TERMS)
    assert not found.tasks[0].lost
    lines = comparison_as_markdown(found).splitlines()
    assert lines[2] == "#### sums: 10 largest losses of acc_norm"
    assert all(line.endswith("acc_norm: 1 -> 0") for line in lines[4:])


def test_failure_of_log_probabilities_names_the_largest_losses() -> None:
    base = [item(n, log_probability=-1.0) for n in range(400)]
    now = [item(n, log_probability=-1.1 - n / 1000) for n in range(400)]
    found = compare(evaluation(task(base)), evaluation(task(now)), TERMS)
    assert not found.tasks[0].lost
    lines = comparison_as_markdown(found).splitlines()
    place = lines.index("#### sums: 10 largest losses of log-probability")
    assert lines[place + 2] == (
        "- `399+1=`, right: `400`, base: `400`, candidate: `400`, log-probability: -1 -> -1.499"
    )
    assert len(lines) == place + 12


def test_number_of_clusters_is_stated() -> None:
    items = [item(n, cluster=f"text {n % 50}") for n in range(400)]
    found = compare(evaluation(task(items)), evaluation(task(items)), Terms(accuracy=0.2))
    (measure,) = found.tasks[0].measures
    assert measure_in_words(measure).endswith("is excluded by 400 items in 50 clusters")
    (numbers,) = (verdict_of(found).levels["sums"].model_extra or {})["measures"]
    assert (numbers["items"], numbers["clusters"]) == (400, 50)


def test_clusters_that_only_the_candidate_recorded_do_not_count() -> None:
    """With three clusters, sixty items without a loss would exclude a drop of 3 %."""
    base = [item(n) for n in range(60)]
    candidate = [item(n, cluster=f"text {n % 3}") for n in range(60)]
    terms = Terms(accuracy=0.03)
    found = compare(evaluation(task(base)), evaluation(task(candidate)), terms)
    assert found.judged is Outcome.NOT_COMPARED
    assert found.tasks[0].measures[0].num_clusters is None


def test_order_of_documents_does_not_matter() -> None:
    turned = replace(BASE, items=BASE.items[::-1])
    assert compare(evaluation(BASE), evaluation(turned), TERMS).tasks[0].problem is None
    assert all(one.key == two.key for one, two in pairs_of(BASE, turned))


MANY, FEWER = answered(400, 400), answered(390, 400)


def test_task_of_the_base_alone_is_named_and_forbids_a_pass() -> None:
    base = evaluation(MANY, replace(MANY, name="mmlu"))
    found = compare(base, evaluation(MANY), TERMS)
    assert {task.name: task.judged for task in found.tasks} == {
        "mmlu": Outcome.NOT_COMPARED,
        "sums": Outcome.PASS,
    }
    verdict = verdict_of(found)
    assert found.judged is verdict.verdict is Outcome.NOT_COMPARED
    reason = "only the base has this task: the candidate is not compared with it"
    assert verdict.levels["mmlu"].reason == reason
    assert [step.purpose for step in verdict.next_steps] == [
        "mmlu: run the candidate again with this task, or judge what both sides have: --task sums"
    ]
    assert compare(base, evaluation(FEWER), TERMS).judged is Outcome.FAIL
    assert compare(base, evaluation(), TERMS).judged is Outcome.NOT_COMPARED


def test_task_of_the_candidate_alone_is_named_and_does_not_count() -> None:
    others = [replace(FEWER, name=f"mmlu_{n}") for n in range(5)]
    found = compare(evaluation(MANY), evaluation(MANY, *others), TERMS)
    verdict = verdict_of(found)
    assert found.judged is verdict.verdict is Outcome.PASS
    # A note that several tasks share is there once.
    note = "mmlu_0, mmlu_1, mmlu_2 and 2 more: only the candidate has it: not judged, and without effect on the verdict"
    assert verdict.notes[0] == note
    assert verdict.unmatched.actual == [one.name for one in others]


def test_tasks_of_one_side_are_named_next_to_different_questions() -> None:
    base = evaluation(BASE, replace(BASE, name="mmlu"))
    other = evaluation(replace(BASE, asked={"version": 2.0}), replace(BASE, name="more"))
    text = verdict_of(compare(base, other, TERMS)).to_json()
    for told in (
        "version is 2.0, base 1.0",
        "only the base has this",
        "more: only the candidate has it",
    ):
        assert told in text


def with_both_metrics(
    num_right: int, num_normalized: int, name: str = "sums", num_items: int = 400
) -> TaskResult:
    """Items with `acc` and `acc_norm`."""
    scores = {
        metric: Score(kind="yes-no", values=tuple(float(n < num) for n in range(num_items)))
        for metric, num in (("acc", num_right), ("acc_norm", num_normalized))
    }
    return replace(answered(num_right, num_items), name=name, scores=scores)


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({}, Outcome.FAIL),  # all metrics
        ({"sums": ["acc"]}, Outcome.PASS),
        ({"sums": ["acc_norm"]}, Outcome.FAIL),
        ({"sums": ["acc", "acc_norm"]}, Outcome.FAIL),
        ({"all": ["acc"]}, Outcome.PASS),  # a group
    ],
)
def test_chosen_metric_decides(metrics: dict[str, list[str]], expected: Outcome) -> None:
    tasks = [with_both_metrics(300, lost, "sums (first)") for lost in (300, 290)]
    sides = [replace(evaluation(one), groups={"all": (one.name,)}) for one in tasks]
    found = compare(sides[0], sides[1], Terms(accuracy=0.02, metrics=metrics))
    assert found.judged is expected
    if metrics == {"sums": ["acc_norm"]}:
        (task,) = found.tasks
        assert [measure.name for measure in task.measures] == ["acc_norm"]
        assert [pair[0].key for pair in task.lost] == [f"k{n}" for n in range(290, 300)]
        assert found.notes == ("sums (first): acc_norm was chosen; not judged: acc",)


def test_metric_that_only_the_base_has_is_not_compared() -> None:
    base, candidate = with_both_metrics(300, 300), with_both_metrics(300, 300)
    candidate = replace(candidate, scores={"acc": candidate.scores["acc"]})
    for metrics in ({"sums": ["acc_norm"]}, {}):
        found = compare(evaluation(base), evaluation(candidate), Terms(metrics=metrics))
        assert found.judged is Outcome.NOT_COMPARED
        assert "acc_norm" in verdict_of(found).to_json()


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ({"mmlu": ["acc"]}, "metric of mmlu: model has no such task, only sums"),
        ({"sums": ["f1"]}, "metric f1: sums has acc, acc_norm"),
    ],
)
def test_unknown_task_or_metric_is_an_error(metrics: dict[str, list[str]], told: str) -> None:
    side = evaluation(with_both_metrics(300, 300))
    with pytest.raises(UsageError, match=told):
        compare(side, side, Terms(metrics=metrics))


def test_chosen_tasks_alone_decide_and_the_others_are_named() -> None:
    base, candidate = suite(3, num_lost=0, num_items=400), suite(3, num_lost=0, num_items=400)
    first, *others = base.tasks
    worse = answered(300, 400)
    candidate = replace(candidate, tasks=candidate.tasks | {others[0]: worse})
    terms = TERMS.model_copy(update={"tasks": (first,)})
    found = compare(base, candidate, terms)
    assert [one.name for one in found.parts] == [first]
    assert found.notes[0] == f"chosen: {first}; not judged: {', '.join(others)}"
    assert compare(base, candidate, TERMS).judged is not found.judged is Outcome.PASS
    with pytest.raises(UsageError, match="task absent: model has no such task, only "):
        compare(base, candidate, TERMS.model_copy(update={"tasks": ("absent",)}))


def test_perplexity_is_named_for_its_numbers() -> None:
    values = Score(kind="nats per byte", values=(-1.5,) * 400)
    items = [item(n, right=None) for n in range(400)]
    side = evaluation(task(items, scores={"perplexity": values}))
    (measure,) = compare(side, side, TERMS).tasks[0].measures
    assert measure_in_words(measure).startswith(
        "log-likelihood (nats per byte) -1.5000 -> -1.5000, "
    )


def test_perplexity_and_log_probability_of_whole_texts_are_one_measure() -> None:
    """The perplexity weights each text by its length: it replaces the mean over texts."""
    values = Score(kind="nats per byte", values=(-1.5,) * 400)
    items = [item(n, None, -1.4) for n in range(400)]
    texts = replace(
        task(items, scores={"perplexity": values}),
        asked={"output_type": "loglikelihood_rolling"},
    )
    side = evaluation(texts)
    (measure,) = compare(side, side, TERMS).tasks[0].measures
    assert (measure.name, measure.base) == ("log-probability", -1.5)
    for name in ("log-probability", "perplexity", "bits_per_byte"):
        chosen = TERMS.model_copy(update={"metrics": {"sums": (name,)}})
        (measure,) = compare(side, side, chosen).tasks[0].measures
        assert (measure.name, measure.base) == ("log-probability", -1.5)
