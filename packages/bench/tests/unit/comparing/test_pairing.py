"""Two evaluations are compared only if their questions are equal."""

from dataclasses import replace

import pytest

from assay_bench.comparing.judging import compare
from assay_bench.comparing.pairing import differences, pairs_of
from assay_bench.comparing.terms import PairedOutcome, Terms
from assay_bench.evaluations.items import TaskResult
from packages.bench.tests.unit.sample_evaluations import answered, evaluation, item, task

BASE = answered(5, 10)


def changed(number: int, **update: str) -> TaskResult:
    items = [replace(one, **update) if n == number else one for n, one in enumerate(BASE.items)]  # type: ignore[arg-type]
    return replace(BASE, items=tuple(items))


@pytest.mark.parametrize(
    ("candidate", "told"),
    [
        (replace(BASE, asked=BASE.asked | {"fewshot": 5}), "sums: fewshot is 5, base 0"),
        (replace(BASE, asked=BASE.asked | {"version": 2.0}), "sums: version is 2.0, base 1.0"),
        (replace(BASE, metric="acc_norm"), "sums: metric is acc_norm, base acc"),
        (changed(3, prompt_hash="other"), "sums: 1 of 10 prompts differ"),
        (changed(3, target_hash="other"), "sums: 1 of 10 right answers differ"),
        (
            replace(BASE, items=BASE.items[:-2]),
            "sums: missing from the candidate: 2 of 10 documents",
        ),
        (task([*BASE.items, item(99)]), "sums: only in the candidate: 1 documents"),
        (replace(BASE, name="other"), "the candidate has no sums"),
    ],
)
def test_different_questions_are_named_and_not_compared(candidate: TaskResult, told: str) -> None:
    found = compare(evaluation(BASE), evaluation(candidate), Terms())
    assert found.judged is PairedOutcome.NOT_COMPARED
    assert list(found.refused) == [told]


def test_order_of_documents_does_not_matter() -> None:
    turned = replace(BASE, items=BASE.items[::-1])
    assert differences(evaluation(BASE), evaluation(turned)) == []
    assert all(one.key == two.key for one, two in pairs_of(BASE, turned))


def test_extra_tasks_of_the_candidate_do_not_matter() -> None:
    more = evaluation(BASE, replace(BASE, name="more"))
    assert differences(evaluation(BASE), more) == []
