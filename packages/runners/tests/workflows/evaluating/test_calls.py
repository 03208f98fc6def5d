"""Jobs that call other workflows."""

from collections.abc import Callable
from typing import Any

import pytest

from assay.errors import UsageError
from packages.runners.tests.github_parser.workflows import EvaluatedCase

Evaluate = Callable[..., EvaluatedCase]

PUSH = {"ref": "refs/heads/main"}

CALLER = """
    on: push
    jobs:
      machines:
        strategy:
          matrix:
            include: [{target: nvidia, minutes: 30}, {target: amd-4, minutes: 45}]
        uses: our/repo/.github/workflows/called.yml@main
        permissions: {contents: read}
        with:
          target: ${{ matrix.target }}
          minutes: ${{ matrix.minutes }}
      after:
        needs: [machines]
        if: needs.machines.outputs.seen == 'yes'
        runs-on: x
        steps: [{run: id}]
"""
CALLED = """
    on:
      workflow_call:
        inputs:
          target: {type: string, required: true}
          minutes: {type: number, required: true}
          note: {type: string, default: '${{ github.run_id }}-note'}
        outputs:
          seen: {value: '${{ jobs.run.outputs.seen }}'}
    permissions: {}
    jobs:
      run:
        if: inputs.target != 'nobody'
        runs-on: {group: accelerators, labels: 'assay-${{ inputs.target }}'}
        timeout-minutes: ${{ inputs.minutes }}
        permissions: {contents: read}
        outputs: {seen: '${{ steps.x.outputs.seen }}'}
        steps: [{uses: actions/checkout@v7}]
"""


def errors(case: EvaluatedCase) -> list[tuple[str, str]]:
    return [(error.job, error.message) for error in case.errors]


def test_a_called_workflow_runs_once_for_each_combination(evaluate_event: Evaluate) -> None:
    case = evaluate_event({"one": CALLER, "called": CALLED}, "push", PUSH)
    assert case.errors == ()
    assert case.workflows == {"one.yml": True, "called.yml": False}
    assert [(job.workflow, job.job) for job in case.jobs] == [("one.yml", "machines / run")] * 2
    first = case.jobs[0]
    assert first.inputs == {"target": "nvidia", "minutes": 30, "note": "77-note"}
    assert (first.runs_on.group, first.runs_on.labels) == ("accelerators", ("assay-nvidia",))
    assert first.timeout_minutes == 30
    assert first.matrix == {}
    assert first.checkouts == ("1" * 40,)


@pytest.mark.parametrize(
    "outputs", [{"machines": {"seen": "yes"}}, {"machines / run": {"seen": "yes"}}]
)
def test_outputs_of_a_called_workflow_reach_the_caller(
    evaluate_event: Evaluate, outputs: dict[str, dict[str, str]]
) -> None:
    workflows = {"one": CALLER, "called": CALLED}
    case = evaluate_event(workflows, "push", PUSH, outputs={"one.yml": outputs})
    assert case.jobs[-1].job == "after"


def test_a_failed_job_of_a_called_workflow_fails_the_caller(evaluate_event: Evaluate) -> None:
    case = evaluate_event(
        {"one": CALLER, "called": CALLED},
        "push",
        PUSH,
        outputs={"one.yml": {"machines": {"seen": "yes"}}},
        results={"one.yml": {"machines / run": "failure"}},
    )
    assert [job.job for job in case.skipped] == ["after"]


def call(given: str, permissions: str = "{contents: read}", uses: str = "./") -> str:
    """Make a workflow that calls "called.yml"."""
    return f"""
    on: push
    jobs:
      calls:
        uses: {uses}.github/workflows/called.yml
        permissions: {permissions}
        with: {given}
    """


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{minutes: 5}", "the input target is required, and not given"),
        ("{target: x, minutes: '5'}", 'the input minutes is "5", and a number is expected'),
        ("{target: x, minutes: 5, more: 1}", "the input more is not declared"),
    ],
)
def test_inputs_of_a_called_workflow_are_checked(
    evaluate_event: Evaluate, given: str, message: str
) -> None:
    case = evaluate_event({"one": call(given), "called": CALLED}, "push", PUSH)
    assert errors(case) == [("calls", message)]
    assert case.jobs == ()


@pytest.mark.parametrize("uses", ["./", "$/"])
def test_a_workflow_of_the_same_commit_has_two_spellings(
    evaluate_event: Evaluate, uses: str
) -> None:
    workflows = {"one": call("{target: x, minutes: 5}", uses=uses), "called": CALLED}
    assert [job.job for job in evaluate_event(workflows, "push", PUSH).jobs] == ["calls / run"]


def test_a_workflow_of_another_repository_must_be_given(evaluate_event: Evaluate) -> None:
    caller = CALLER.replace("our/repo", "their/repo")
    uses = "their/repo/.github/workflows/called.yml@main"
    case = evaluate_event({"one": caller}, "push", PUSH, reusable={uses: CALLED})
    assert [job.job for job in case.jobs] == ["machines / run", "machines / run"]
    with pytest.raises(UsageError, match=f"one.yml uses {uses}, which is not given"):
        evaluate_event({"one": caller}, "push", PUSH)


def test_a_workflow_without_workflow_call_cannot_be_called(evaluate_event: Evaluate) -> None:
    called = "on: push\njobs: {run: {runs-on: x, steps: [{run: id}]}}"
    with pytest.raises(UsageError, match="which has no workflow_call"):
        evaluate_event({"one": call("{}"), "called": called}, "push", PUSH)


def permitted(own: str) -> str:
    """Make a called workflow whose job has the line `own`."""
    return f"""
    on: workflow_call
    jobs:
      run:
        runs-on: x
        {own}
        steps: [{{run: id}}]
    """


@pytest.mark.parametrize(
    ("allowed", "own", "expected"),
    [
        ("{contents: write, issues: write}", "permissions: {contents: read}", {"contents": "read"}),
        ("{contents: read}", "permissions: {}", {}),
        ("{contents: read}", "", {"contents": "read"}),
    ],
)
def test_a_called_job_narrows_the_permissions_of_its_caller(
    evaluate_event: Evaluate, allowed: str, own: str, expected: dict[str, str]
) -> None:
    caller = "on: push\njobs: {calls: {uses: ./.github/workflows/called.yml, permissions: %s}}"
    workflows = {"one": caller % allowed, "called": permitted(own)}
    case = evaluate_event(workflows, "push", PUSH)
    assert case.errors == ()
    assert case.jobs[0].permissions == expected


@pytest.mark.parametrize(
    ("own", "excess"),
    [
        ("permissions: {contents: write}", "contents: write"),
        ("permissions: {id-token: write}\n        if: false", "id-token: write"),
    ],
)
def test_a_called_job_never_gets_more_permissions_than_its_caller(
    evaluate_event: Evaluate, own: str, excess: str
) -> None:
    caller = """
    on: push
    permissions: {contents: read}
    jobs:
      calls:
        uses: ./.github/workflows/called.yml
    """
    case = evaluate_event({"one": caller, "called": permitted(own)}, "push", PUSH)
    assert errors(case) == [("calls / run", f"asks for {excess}, which its caller does not have")]
    granted: list[dict[str, Any]] = [job.permissions or {} for job in case.jobs]
    assert all(one in ({"contents": "read"}, {}) for one in granted)
