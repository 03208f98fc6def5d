"""The workflows that an event starts."""

from collections.abc import Callable
from typing import Any

import pytest

from assay.errors import UsageError
from packages.runners.tests.github_parser.workflows import EvaluatedCase

Evaluate = Callable[..., EvaluatedCase]

JOBS = """
jobs:
  only:
    runs-on: ubuntu-24.04
    steps:
      - run: "true"
"""


def on(text: str) -> dict[str, str]:
    return {"one": f"on: {text}\n{JOBS}"}


@pytest.mark.parametrize(
    ("action", "starts"),
    [
        ("opened", True),
        ("synchronize", True),
        ("reopened", True),
        ("labeled", False),
        ("closed", False),
    ],
)
@pytest.mark.parametrize("event_name", ["pull_request", "pull_request_target"])
def test_a_pull_request_without_types_starts_for_new_commits(
    evaluate_event: Evaluate,
    pull_request: dict[str, Any],
    event_name: str,
    action: str,
    starts: bool,
) -> None:
    event = {"action": action, "pull_request": pull_request}
    case = evaluate_event(on(f"[{event_name}]"), event_name, event)
    assert case.workflows == {"one.yml": starts}
    assert bool(case.jobs) is starts


@pytest.mark.parametrize(("action", "starts"), [("labeled", True), ("opened", False)])
def test_types_replace_the_default(
    evaluate_event: Evaluate, pull_request: dict[str, Any], action: str, starts: bool
) -> None:
    event = {"action": action, "pull_request": pull_request}
    case = evaluate_event(on("{pull_request: {types: [labeled]}}"), "pull_request", event)
    assert case.workflows == {"one.yml": starts}


def test_other_events_without_types_start_for_any_activity(evaluate_event: Evaluate) -> None:
    assert evaluate_event(on("issues"), "issues", {"action": "pinned"}).workflows["one.yml"]


def test_pull_request_does_not_start_pull_request_target(
    evaluate_event: Evaluate, pull_request: dict[str, Any]
) -> None:
    event = {"action": "opened", "pull_request": pull_request}
    case = evaluate_event(on("pull_request_target"), "pull_request", event)
    assert case.workflows == {"one.yml": False}


@pytest.mark.parametrize(
    ("filters", "ref", "starts"),
    [
        ("push", "refs/heads/any", True),
        ("push", "refs/tags/v1", True),
        ("{push: {branches: [main]}}", "refs/heads/main", True),
        ("{push: {branches: [main]}}", "refs/heads/main2", False),
        ("{push: {branches: [main]}}", "refs/tags/v1", False),
        ("{push: {branches: [main]}}", "refs/tags/main", False),
        ("{push: {branches-ignore: [wip]}}", "refs/heads/main", True),
        ("{push: {branches-ignore: [wip]}}", "refs/heads/wip", False),
        ("{push: {branches-ignore: [wip]}}", "refs/tags/v1", False),
        ("{push: {tags: ['v*']}}", "refs/tags/v1", True),
        ("{push: {tags: ['v*']}}", "refs/heads/v1", False),
        ("{push: {tags-ignore: ['v*']}}", "refs/tags/v1", False),
        ("{push: {branches: [main], tags: ['v*']}}", "refs/tags/v1", True),
        ("{push: {branches: [main], tags: ['v*']}}", "refs/heads/main", True),
        # The special characters of filter patterns.
        ("{push: {branches: ['a/*']}}", "refs/heads/a/b", True),
        ("{push: {branches: ['a/*']}}", "refs/heads/a/b/c", False),
        ("{push: {branches: ['a/**']}}", "refs/heads/a/b/c", True),
        ("{push: {branches: ['*']}}", "refs/heads/a/b", False),
        ("{push: {branches: ['v[12].[0-9]+']}}", "refs/heads/v2.17", True),
        ("{push: {branches: ['v[12].[0-9]+']}}", "refs/heads/v2x17", False),
        ("{push: {branches: ['colou?r']}}", "refs/heads/color", True),
        ("{push: {branches: ['r/**', '!r/**-alpha']}}", "refs/heads/r/10", True),
        ("{push: {branches: ['r/**', '!r/**-alpha']}}", "refs/heads/r/10-alpha", False),
        ("{push: {branches: ['r/**', '!r/**-a', 'r/1-a']}}", "refs/heads/r/1-a", True),
        (r"{push: {branches: ['a\*']}}", "refs/heads/ab", False),
        ("{push: {branches: ['main$(id)']}}", "refs/heads/main$(id)", True),
    ],
)
def test_a_push_is_filtered_by_branch_or_tag(
    evaluate_event: Evaluate, filters: str, ref: str, starts: bool
) -> None:
    assert evaluate_event(on(filters), "push", {"ref": ref}).workflows == {"one.yml": starts}


@pytest.mark.parametrize(
    ("filters", "changed", "starts"),
    [
        ("paths: ['**.py']", ["a/b.py"], True),
        ("paths: ['**.py']", ["a/b.md"], False),
        ("paths: ['**/README.md']", ["README.md"], True),
        ("paths: ['docs/**/*.md']", ["docs/x.md"], True),
        ("paths: ['docs/*']", ["docs/a/x.md"], False),
        ("paths-ignore: ['docs/**']", ["docs/x.md"], False),
        ("paths-ignore: ['docs/**']", ["docs/x.md", "a.py"], True),
        ("paths: ['a/**', '!a/b/**']", ["a/b/c"], False),
        ("paths: ['a/**', '!a/b/**']", ["a/b/c", "a/c"], True),
    ],
)
def test_paths_match_every_changed_file(
    evaluate_event: Evaluate, filters: str, changed: list[str], starts: bool
) -> None:
    event = {"ref": "refs/heads/main"}
    case = evaluate_event(on(f"{{push: {{{filters}}}}}"), "push", event, changed=changed)
    assert case.workflows == {"one.yml": starts}


def test_paths_do_not_filter_tags(evaluate_event: Evaluate) -> None:
    case = evaluate_event(on("{push: {paths: ['**.py']}}"), "push", {"ref": "refs/tags/v1"})
    assert case.workflows == {"one.yml": True}


def test_paths_without_changed_files_are_an_error(evaluate_event: Evaluate) -> None:
    with pytest.raises(UsageError, match=r'one.yml filters paths, and "changed" is not given'):
        evaluate_event(on("{push: {paths: ['**.py']}}"), "push", {"ref": "refs/heads/main"})


@pytest.mark.parametrize(("base", "starts"), [("main", True), ("next", False)])
def test_branches_of_a_pull_request_are_its_base(
    evaluate_event: Evaluate, pull_request: dict[str, Any], base: str, starts: bool
) -> None:
    pull_request["base"]["ref"] = base
    event = {"action": "opened", "pull_request": pull_request}
    case = evaluate_event(on("{pull_request: {branches: [main]}}"), "pull_request", event)
    assert case.workflows == {"one.yml": starts}


@pytest.mark.parametrize(
    ("cron", "starts"), [("17 2 * * *", True), ("41 * * * *", True), ("0 0 * * *", False)]
)
def test_a_schedule_starts_for_its_own_cron(
    evaluate_event: Evaluate, cron: str, starts: bool
) -> None:
    text = "{schedule: [{cron: '17 2 * * *'}, {cron: '41 * * * *'}]}"
    assert evaluate_event(on(text), "schedule", {"schedule": cron}).workflows["one.yml"] is starts


def test_a_dispatch_starts_only_the_workflow_it_names(evaluate_event: Evaluate) -> None:
    workflows = dict.fromkeys(("one", "two"), f"on: workflow_dispatch\n{JOBS}")
    event = {"workflow": ".github/workflows/two.yml"}
    case = evaluate_event(workflows, "workflow_dispatch", event)
    assert case.workflows == {"one.yml": False, "two.yml": True}


def test_a_dispatch_starts_nothing_without_workflow_dispatch(evaluate_event: Evaluate) -> None:
    event = {"workflow": ".github/workflows/one.yml"}
    case = evaluate_event(on("push"), "workflow_dispatch", event)
    assert case.workflows == {"one.yml": False}


def test_a_dispatch_of_an_unknown_workflow_is_an_error(evaluate_event: Evaluate) -> None:
    with pytest.raises(UsageError, match=r"the dispatch is not one of .github/workflows/one.yml"):
        evaluate_event(on("workflow_dispatch"), "workflow_dispatch", {"workflow": "one.yml"})


@pytest.mark.parametrize("event_name", ["push", "workflow_call"])
def test_no_event_starts_a_called_workflow(evaluate_event: Evaluate, event_name: str) -> None:
    case = evaluate_event(on("workflow_call"), event_name, {"ref": "refs/heads/main"})
    assert case.workflows == {"one.yml": False}


def test_a_merge_group_starts(evaluate_event: Evaluate) -> None:
    event = {"action": "checks_requested", "merge_group": {"base_ref": "refs/heads/main"}}
    text = "{merge_group: {types: [checks_requested], branches: [main]}}"
    assert evaluate_event(on(text), "merge_group", event).workflows["one.yml"]


def test_a_payload_without_its_action_is_an_error(
    evaluate_event: Evaluate, pull_request: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match="the payload of pull_request lacks its action"):
        evaluate_event(on("pull_request"), "pull_request", {"pull_request": pull_request})


DISPATCH = f"""
on:
  workflow_dispatch:
    inputs:
      model: {{required: true}}
      size: {{type: choice, options: [small, large], default: large}}
      deep: {{type: boolean, default: true}}
      count: {{type: number, default: 3}}
      note: {{}}
{JOBS}
"""


def dispatch(evaluate_event: Evaluate, **inputs: str) -> EvaluatedCase:
    event = {"workflow": ".github/workflows/one.yml", "inputs": inputs}
    return evaluate_event({"one": DISPATCH}, "workflow_dispatch", event)


def test_inputs_of_a_dispatch_have_their_types_and_defaults(evaluate_event: Evaluate) -> None:
    (job,) = dispatch(evaluate_event, model="micro:llama", deep="false").jobs
    expected = {"model": "micro:llama", "size": "large", "deep": False, "count": 3, "note": ""}
    assert job.inputs == expected


def test_the_payload_of_a_dispatch_has_string_inputs(evaluate_event: Evaluate) -> None:
    text = DISPATCH.replace(
        "ubuntu-24.04", "${{ github.event.inputs.deep }}-${{ github.event.inputs.size }}"
    ).replace(
        "runs-on", "if: github.event.inputs.deep == 'true' && inputs.deep == true\n    runs-on"
    )
    event = {"workflow": ".github/workflows/one.yml", "inputs": {"model": "m"}}
    (job,) = evaluate_event({"one": text}, "workflow_dispatch", event).jobs
    assert job.runs_on.labels == ("true-large",)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "the input model is required, and not given"),
        ({"model": ""}, "the input model is required, and not given"),
        (
            {"model": "m", "size": "huge"},
            "the input size is huge, and one of small, large is expected",
        ),
        ({"model": "m", "deep": "yes"}, 'the input deep is "yes", and true or false is expected'),
        ({"model": "m", "count": "x"}, 'the input count is "x", and a number is expected'),
        ({"model": "m", "colour": "red"}, "the input colour is not declared"),
    ],
)
def test_a_dispatch_with_wrong_inputs_starts_nothing(
    evaluate_event: Evaluate, inputs: dict[str, str], message: str
) -> None:
    case = dispatch(evaluate_event, **inputs)
    assert case.workflows == {"one.yml": False}
    assert case.jobs == ()
    assert [(error.job, error.message) for error in case.errors] == [("", message)]
