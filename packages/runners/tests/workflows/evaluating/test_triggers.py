"""The workflows that an event starts."""

from collections.abc import Callable
from typing import Any

import pytest

from assay.errors import MachineError, UsageError
from packages.runners.tests.github_parser.workflows import EvaluatedCase

Evaluate = Callable[..., EvaluatedCase]

JOBS = """
jobs:
  only:
    runs-on: ubuntu-24.04
    steps:
      - run: "true"
"""
PUSH = {"ref": "refs/heads/main"}


def on(text: str) -> dict[str, str]:
    return {"one": f"on: {text}\n{JOBS}"}


@pytest.mark.parametrize(
    ("events", "event_name", "action", "starts"),
    [
        ("[pull_request]", "pull_request", "opened", True),
        ("[pull_request]", "pull_request", "synchronize", True),
        ("[pull_request]", "pull_request", "labeled", False),
        ("[pull_request_target]", "pull_request_target", "reopened", True),
        ("[pull_request_target]", "pull_request_target", "closed", False),
        ("[pull_request_target]", "pull_request", "opened", False),
        ("{pull_request: {types: [labeled]}}", "pull_request", "labeled", True),
        ("{pull_request: {types: [labeled]}}", "pull_request", "opened", False),
        ("issues", "issues", "pinned", True),
    ],
)
def test_types_select_pull_requests(
    evaluate_event: Evaluate,
    pull_request: dict[str, Any],
    events: str,
    event_name: str,
    action: str,
    starts: bool,
) -> None:
    event = {"action": action, "pull_request": pull_request}
    case = evaluate_event(on(events), event_name, event)
    assert case.workflows == {"one.yml": starts}
    assert bool(case.jobs) is starts


@pytest.mark.parametrize(
    ("filters", "ref", "starts"),
    [
        ("push", "refs/heads/any", True),
        ("push", "refs/tags/v1", True),
        ("{push: {branches: [main]}}", "refs/heads/main", True),
        ("{push: {branches: [main]}}", "refs/heads/main2", False),
        ("{push: {branches: [main]}}", "refs/heads/a/main", False),
        ("{push: {branches: [main]}}", "refs/tags/main", False),
        ("{push: {tags: ['v*']}}", "refs/tags/v1.0", True),
        ("{push: {tags: ['v*']}}", "refs/tags/v1/x", False),
        ("{push: {tags: ['v*']}}", "refs/tags/1.0", False),
        ("{push: {tags: ['v*']}}", "refs/heads/v1.0", False),
        ("{push: {branches: [main], tags: ['v*']}}", "refs/heads/main", True),
    ],
)
def test_a_push_is_filtered_by_its_branch_or_tag(
    evaluate_event: Evaluate, filters: str, ref: str, starts: bool
) -> None:
    assert evaluate_event(on(filters), "push", {"ref": ref}).workflows == {"one.yml": starts}


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ("{push: {paths: ['**.py']}}", "one.yml filters by paths, which is not evaluated"),
        ("{push: {tags-ignore: [v1]}}", "one.yml filters by tags-ignore, which"),
        ("{push: {branches: ['r/**', '!r/1']}}", r"one.yml filters by r/\*\*, !r/1, which"),
        ("{push: {branches-ignore: [wip]}}", "one.yml filters by branches-ignore, which"),
        ("{merge_group: {branches: [main]}}", "one.yml filters by branches, which"),
    ],
)
def test_a_filter_that_no_workflow_of_ours_has_is_an_error(
    evaluate_event: Evaluate, filters: str, message: str
) -> None:
    event_name = filters[1:].partition(":")[0]
    with pytest.raises(UsageError, match=message):
        evaluate_event(on(filters), event_name, PUSH)


@pytest.mark.parametrize(
    ("cron", "starts"), [("17 2 * * *", True), ("41 * * * *", True), ("0 0 * * *", False)]
)
def test_a_schedule_starts_for_its_own_cron(
    evaluate_event: Evaluate, cron: str, starts: bool
) -> None:
    text = "{schedule: [{cron: '17 2 * * *'}, {cron: '41 * * * *'}]}"
    assert evaluate_event(on(text), "schedule", {"schedule": cron}).workflows["one.yml"] is starts


def test_a_dispatch_starts_only_the_workflow_it_names(evaluate_event: Evaluate) -> None:
    workflows = dict.fromkeys(("one", "two"), f"on: workflow_dispatch\n{JOBS}") | {
        "three": f"on: push\n{JOBS}"
    }
    event = {"workflow": ".github/workflows/two.yml"}
    case = evaluate_event(workflows, "workflow_dispatch", event)
    assert case.workflows == {"one.yml": False, "three.yml": False, "two.yml": True}


@pytest.mark.parametrize("event_name", ["push", "workflow_call"])
def test_no_event_starts_a_called_workflow(evaluate_event: Evaluate, event_name: str) -> None:
    case = evaluate_event(on("workflow_call"), event_name, PUSH)
    assert case.workflows == {"one.yml": False}


def test_a_merge_group_starts(evaluate_event: Evaluate) -> None:
    event = {"action": "checks_requested"}
    text = "{merge_group: {types: [checks_requested]}}"
    assert evaluate_event(on(text), "merge_group", event).workflows["one.yml"]


DISPATCH = f"""
on:
  workflow_dispatch:
    inputs:
      model: {{required: true}}
      size: {{type: string, default: large}}
      note: {{}}
{JOBS}
"""


def dispatch(evaluate_event: Evaluate, text: str, **inputs: str) -> EvaluatedCase:
    event = {"workflow": ".github/workflows/one.yml", "inputs": inputs}
    return evaluate_event({"one": text}, "workflow_dispatch", event)


def test_inputs_of_a_dispatch_have_their_defaults_also_in_the_payload(
    evaluate_event: Evaluate,
) -> None:
    text = DISPATCH.replace("ubuntu-24.04", "${{ github.event.inputs.size }}-${{ inputs.size }}")
    (job,) = dispatch(evaluate_event, text, model="micro:llama").jobs
    assert job.inputs == {"model": "micro:llama", "size": "large", "note": ""}
    assert job.runs_on.labels == ("large-large",)


def test_an_input_that_a_dispatch_does_not_declare_is_an_error(evaluate_event: Evaluate) -> None:
    with pytest.raises(MachineError, match="the input colour is not declared"):
        dispatch(evaluate_event, DISPATCH, model="m", colour="red")
