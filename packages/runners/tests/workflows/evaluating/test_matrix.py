"""The combinations of a matrix."""

import json
from collections.abc import Callable

import pytest

from packages.runners.tests.github_parser.workflows import EvaluatedCase

Evaluate = Callable[..., EvaluatedCase]

PUSH = {"ref": "refs/heads/main"}


def errors(case: EvaluatedCase) -> list[tuple[str, str]]:
    return [(error.job, error.message) for error in case.errors]


def one_job(text: str) -> dict[str, str]:
    """Make a workflow with one job, which has the lines of `text`."""
    lines = "".join(f"    {line}\n" for line in text.strip().splitlines())
    return {"one": f"on: [push, pull_request]\njobs:\n  only:\n{lines}    steps: [{{run: id}}]\n"}


MATRIX = """
    on: push
    jobs:
      plan:
        runs-on: x
        outputs:
          machines: ${{ steps.plan.outputs.machines }}
        steps: [{run: id}]
      each:
        needs: [plan]
        strategy:
          matrix: %s
        runs-on: ${{ matrix.target }}
        timeout-minutes: ${{ matrix.minutes }}
        steps: [{run: id}]
"""
MACHINES = [{"target": "nvidia", "minutes": 30}, {"target": "amd-4", "minutes": 45}]


def legs(evaluate_event: Evaluate, matrix: str, machines: object) -> EvaluatedCase:
    outputs = {"one.yml": {"plan": {"machines": json.dumps(machines)}}}
    return evaluate_event({"one": MATRIX % matrix}, "push", PUSH, outputs=outputs)


@pytest.mark.parametrize(
    ("matrix", "machines"),
    [
        ("{include: '${{ fromJSON(needs.plan.outputs.machines) }}'}", MACHINES),
        ("${{ fromJSON(needs.plan.outputs.machines) }}", {"include": MACHINES}),
    ],
)
def test_a_matrix_from_an_output_has_one_job_for_each_entry(
    evaluate_event: Evaluate, matrix: str, machines: object
) -> None:
    case = legs(evaluate_event, matrix, machines)
    assert [job.job for job in case.jobs] == ["plan", "each", "each"]
    first, second = case.jobs[1:]
    assert first.matrix == {"target": "nvidia", "minutes": 30}
    assert (first.runs_on.labels, first.timeout_minutes) == (("nvidia",), 30)
    assert (second.runs_on.labels, second.timeout_minutes) == (("amd-4",), 45)
    assert [first.name, second.name] == ["each (nvidia, 30)", "each (amd-4, 45)"]


def test_a_key_of_a_matrix_is_an_expression(evaluate_event: Evaluate) -> None:
    matrix = "{target: '${{ fromJSON(needs.plan.outputs.machines) }}', minutes: [5, 6]}"
    case = legs(evaluate_event, matrix, ["a", "b"])
    assert [job.matrix for job in case.jobs[1:]] == [
        {"target": "a", "minutes": 5},
        {"target": "a", "minutes": 6},
        {"target": "b", "minutes": 5},
        {"target": "b", "minutes": 6},
    ]


@pytest.mark.parametrize(
    ("matrix", "machines", "message"),
    [
        (
            "{include: '${{ fromJSON(needs.plan.outputs.machines) }}'}",
            [],
            "empty matrix: there is no combination",
        ),
        (
            "{target: '${{ fromJSON(needs.plan.outputs.machines) }}', minutes: [5]}",
            [],
            "empty matrix: target has no values",
        ),
        (
            "${{ fromJSON(needs.plan.outputs.machines) }}",
            {},
            "empty matrix: there is no combination",
        ),
        (
            "{target: [a], minutes: [5], exclude: [{target: a}]}",
            None,
            "empty matrix: there is no combination",
        ),
    ],
)
def test_an_empty_matrix_fails_its_job(
    evaluate_event: Evaluate, matrix: str, machines: object, message: str
) -> None:
    case = legs(evaluate_event, matrix, machines)
    assert errors(case) == [("each", message)]
    assert [job.job for job in case.jobs] == ["plan"]


def test_include_extends_combinations_without_overwriting(evaluate_event: Evaluate) -> None:
    # The example in GitHub's documentation of `include`, with its six combinations.
    case = evaluate_event(
        one_job(
            """
            runs-on: x
            strategy:
              matrix:
                fruit: [apple, pear]
                animal: [cat, dog]
                include:
                  - color: green
                  - {color: pink, animal: cat}
                  - {fruit: apple, shape: circle}
                  - fruit: banana
                  - {fruit: banana, animal: cat}
            """.replace("\n            ", "\n")
        ),
        "push",
        PUSH,
    )
    assert [job.matrix for job in case.jobs] == [
        {"fruit": "apple", "animal": "cat", "color": "pink", "shape": "circle"},
        {"fruit": "apple", "animal": "dog", "color": "green", "shape": "circle"},
        {"fruit": "pear", "animal": "cat", "color": "pink"},
        {"fruit": "pear", "animal": "dog", "color": "green"},
        {"fruit": "banana"},
        {"fruit": "banana", "animal": "cat"},
    ]


def test_exclude_removes_partial_matches(evaluate_event: Evaluate) -> None:
    text = "runs-on: x\nstrategy: {matrix: {a: [1, 2], b: [3, 4], exclude: [{a: 1}, {a: 2, b: 4}]}}"
    case = evaluate_event(one_job(text), "push", PUSH)
    assert [job.matrix for job in case.jobs] == [{"a": 2, "b": 3}]


def test_a_missing_output_fails_the_matrix(evaluate_event: Evaluate) -> None:
    matrix = "{include: '${{ fromJSON(needs.plan.outputs.machines) }}'}"
    case = evaluate_event({"one": MATRIX % matrix}, "push", PUSH)
    ((job, message),) = errors(case)
    assert job == "each"
    assert message.startswith("${{ fromJSON(needs.plan.outputs.machines) }}: ")
