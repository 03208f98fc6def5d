"""The jobs of a started workflow: their conditions, machines and inputs."""

from collections.abc import Callable
from typing import Any

import pytest

from packages.runners.tests.github_parser.workflows import EvaluatedCase, EvaluatedJob

Evaluate = Callable[..., EvaluatedCase]

PUSH = {"ref": "refs/heads/main"}


def started(case: EvaluatedCase) -> list[str]:
    assert case.errors == ()
    return [job.job for job in case.jobs]


def skipped(case: EvaluatedCase) -> list[str]:
    return [job.job for job in case.skipped]


def errors(case: EvaluatedCase) -> list[tuple[str, str]]:
    return [(error.job, error.message) for error in case.errors]


def only(case: EvaluatedCase) -> EvaluatedJob:
    assert case.errors == ()
    (job,) = case.jobs
    return job


def one_job(text: str) -> dict[str, str]:
    """Make a workflow with one job, which has the lines of `text`."""
    lines = "".join(f"    {line}\n" for line in text.strip().splitlines())
    return {"one": f"on: [push, pull_request]\njobs:\n  only:\n{lines}    steps: [{{run: id}}]\n"}


CHAIN = """
    on: push
    jobs:
      first:
        if: vars.RUN == 'yes'
        runs-on: x
        steps: [{run: id}]
      second:
        needs: first
        runs-on: x
        steps: [{run: id}]
      anyway:
        if: always()
        needs: [first]
        runs-on: x
        steps: [{run: id}]
      after-anyway:
        needs: [anyway]
        runs-on: x
        steps: [{run: id}]
      after-second:
        needs: [second]
        if: vars.RUN != 'never'
        runs-on: x
        steps: [{run: id}]
"""


@pytest.mark.parametrize("braces", ["{}", "${{{{ {} }}}}"])
@pytest.mark.parametrize(("label", "runs"), [("SMOKE:NVIDIA", True), ("smoke:amd", False)])
def test_a_condition_selects_jobs(
    evaluate_event: Evaluate, pull_request: dict[str, Any], braces: str, label: str, runs: bool
) -> None:
    condition = braces.format("github.event.label.name == 'smoke:nvidia'")
    event = {"action": "opened", "label": {"name": label}, "pull_request": pull_request}
    case = evaluate_event(one_job(f"runs-on: x\nif: {condition}"), "pull_request", event)
    assert started(case) == (["only"] if runs else [])


def test_jobs_after_a_skipped_job_are_skipped(evaluate_event: Evaluate) -> None:
    case = evaluate_event({"one": CHAIN}, "push", PUSH, vars={"RUN": "no"})
    # after-anyway needs only a successful job, but success() checks all earlier jobs.
    assert started(case) == ["anyway"]
    assert skipped(case) == ["first", "second", "after-anyway", "after-second"]


def test_all_later_jobs_see_a_failure(evaluate_event: Evaluate) -> None:
    results = {"one.yml": {"first": "failure"}}
    case = evaluate_event({"one": CHAIN}, "push", PUSH, vars={"RUN": "yes"}, results=results)
    assert started(case) == ["first", "anyway"]


@pytest.mark.parametrize(
    ("runs_on", "group", "labels"),
    [
        ("ubuntu-24.04", None, ("ubuntu-24.04",)),
        ("[self-hosted, '${{ vars.LABEL }}']", None, ("self-hosted", "gpu")),
        ("{group: big, labels: gpu}", "big", ("gpu",)),
    ],
)
def test_runs_on_has_three_forms(
    evaluate_event: Evaluate, runs_on: str, group: str | None, labels: tuple[str, ...]
) -> None:
    workflows = one_job(f"runs-on: {runs_on}")
    job = only(evaluate_event(workflows, "push", PUSH, vars={"LABEL": "gpu"}))
    assert (job.runs_on.group, job.runs_on.labels) == (group, labels)


def test_a_string_timeout_is_an_error(evaluate_event: Evaluate) -> None:
    workflows = one_job("runs-on: x\ntimeout-minutes: ${{ vars.MINUTES }}")
    case = evaluate_event(workflows, "push", PUSH, vars={"MINUTES": "30"})
    assert errors(case) == [("only", 'timeout-minutes is "30", and a number is expected')]


def test_a_job_is_described_completely(evaluate_event: Evaluate) -> None:
    text = """
        on: push
        permissions: {contents: read, issues: write}
        env: {SHA: '${{ github.sha }}'}
        jobs:
          only:
            if: github.ref == 'refs/heads/main'
            runs-on: x
            environment: prod-${{ vars.WHERE }}
            timeout-minutes: 7
            permissions: {contents: read, actions: none}
            concurrency: {group: 'g-${{ github.sha }}', cancel-in-progress: "${{ 1 == 1 }}"}
            steps:
              - uses: actions/checkout@v7
              - uses: actions/checkout@v7
                with: {ref: '${{ env.SHA }}-${{ env.OWN }}'}
                env: {OWN: step}
              - uses: actions/setup-python@v6
    """
    job = only(evaluate_event({"one": text}, "push", PUSH, vars={"WHERE": "eu"}))
    assert job.model_dump(by_alias=True) == {
        "workflow": "one.yml",
        "job": "only",
        "matrix": {},
        "inputs": {},
        "runs_on": {"group": None, "labels": ("x",)},
        "checkouts": ("1" * 40, f"{'1' * 40}-step"),
        "permissions": {"contents": "read"},
        "environment": "prod-eu",
        "timeout_minutes": 7,
        "concurrency": {"group": f"g-{'1' * 40}", "cancel-in-progress": True},
    }
