"""The combinations of a matrix."""

import json
from collections.abc import Callable

import pytest

from packages.runners.tests.github_parser.workflows import EvaluatedCase

Evaluate = Callable[..., EvaluatedCase]

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
        timeout-minutes: ${{ matrix.minutes || 5 }}
        steps: [{run: id}]
"""
PLANNED = "'${{ fromJSON(needs.plan.outputs.machines) }}'"


def legs(evaluate_event: Evaluate, matrix: str, machines: object) -> EvaluatedCase:
    given = {} if machines is None else {"machines": json.dumps(machines)}
    outputs = {"one.yml": {"plan": given}}
    return evaluate_event(
        {"one": MATRIX % matrix}, "push", {"ref": "refs/heads/main"}, outputs=outputs
    )


def test_a_matrix_from_an_output_has_one_job_for_each_entry(evaluate_event: Evaluate) -> None:
    machines = [{"target": "nvidia", "minutes": 30}, {"target": "amd-4", "minutes": 45}]
    case = legs(evaluate_event, f"{{include: {PLANNED}}}", machines)
    assert [job.job for job in case.jobs] == ["plan", "each", "each"]
    first, second = case.jobs[1:]
    assert first.matrix == {"target": "nvidia", "minutes": 30}
    assert (first.runs_on.labels, first.timeout_minutes) == (("nvidia",), 30)
    assert (second.runs_on.labels, second.timeout_minutes) == (("amd-4",), 45)


def test_a_key_of_a_matrix_is_an_expression(evaluate_event: Evaluate) -> None:
    case = legs(evaluate_event, f"{{target: {PLANNED}}}", ["a", "b"])
    assert [job.matrix for job in case.jobs[1:]] == [{"target": "a"}, {"target": "b"}]


@pytest.mark.parametrize(
    ("matrix", "machines", "message"),
    [
        (f"{{include: {PLANNED}}}", [], "empty matrix: there is no combination"),
        (f"{{target: {PLANNED}}}", [], "empty matrix: there is no combination"),
        (f"{{target: {PLANNED}}}", "a", 'target of the matrix is "a", and a list is expected'),
        ("{target: [a], minutes: [5]}", None, "a matrix of target, minutes is not evaluated"),
    ],
)
def test_an_empty_or_unknown_matrix_fails_its_job(
    evaluate_event: Evaluate, matrix: str, machines: object, message: str
) -> None:
    case = legs(evaluate_event, matrix, machines)
    assert [(error.job, error.message) for error in case.errors] == [("each", message)]
    assert [job.job for job in case.jobs] == ["plan"]


def test_a_missing_output_fails_the_matrix(evaluate_event: Evaluate) -> None:
    (error,) = legs(evaluate_event, f"{{include: {PLANNED}}}", None).errors
    assert error.job == "each"
    assert error.message.startswith("${{ fromJSON(needs.plan.outputs.machines) }}: ")
