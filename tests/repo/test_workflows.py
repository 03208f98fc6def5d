"""Workflows compose and are safe: the rules that no general linter knows."""

import importlib
import re
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import nox.registry
import pytest
from ruamel.yaml import YAML

Workflow = dict[str, Any]

# What a step may run: nox, assay and what it takes to have them ...
COMPOSING_COMMAND = re.compile(r"(python3 -m )?(pip install nox|nox( -s [\w\"$ -]+)?)|assay .+")
# ... and single commands that cannot live in either, each with its reason.
OTHER_COMMANDS = {
    'test "$(git rev-parse HEAD)" = "$HEAD_SHA"': "the commit is checked before its code runs",
    'test "$RESULT" = success': "the aggregate of a matrix is known to the workflow alone",
    'gh api --method DELETE "repos/$REPOSITORY/issues/$NUMBER/labels/$LABEL"': (
        "runs with write access, therefore without any code of the pull request"
    ),
}
PINNED_ACTION = re.compile(r"uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$")


def parse(text: str) -> Workflow:
    workflow: Workflow = YAML(typ="safe").load(StringIO(text))
    return workflow


def steps(workflow: Workflow) -> Iterator[dict[str, Any]]:
    for job in workflow["jobs"].values():
        yield from job.get("steps", [])


def violations(text: str) -> list[str]:
    """The rules that a workflow breaks."""
    workflow = parse(text)
    return [
        *_permission_violations(workflow),
        *_job_violations(workflow),
        *_step_violations(workflow),
        *_trigger_violations(workflow, text),
        *_pin_violations(text),
    ]


def _permission_violations(workflow: Workflow) -> Iterator[str]:
    if workflow.get("permissions") != {}:
        yield "permissions at the top are not empty"
    if "concurrency" in workflow:
        yield "concurrency of a workflow cancels before any `if` of a job is read"


def _job_violations(workflow: Workflow) -> Iterator[str]:
    for name, job in workflow["jobs"].items():
        if "timeout-minutes" not in job:
            yield f"{name} has no timeout"
        events = workflow["on"]
        if "labeled" in _types(events, "pull_request") and "concurrency" not in job:
            yield f"{name} has no concurrency group"


def _step_violations(workflow: Workflow) -> Iterator[str]:
    for step in steps(workflow):
        action = step.get("uses", "")
        if action.startswith("actions/checkout@") and (
            step.get("with", {}).get("persist-credentials") is not False
        ):
            yield "checkout keeps its credentials"
        if "cache" in action or "cache" in step.get("with", {}):
            yield "a cache is saved by an untrusted run"
        for line in step.get("run", "").splitlines():
            if "${{" in line:
                yield f"an expression reaches the shell: {line}"
            elif not COMPOSING_COMMAND.fullmatch(line) and line not in OTHER_COMMANDS:
                yield f"logic in a workflow: {line}"


def _trigger_violations(workflow: Workflow, text: str) -> Iterator[str]:
    events = workflow["on"]
    if {"labeled", "synchronize"} <= _types(events, "pull_request"):
        yield "a push would run on the label of an older commit"
    if "head.ref" in text or "head_ref" in text:
        yield "a branch name is no commit"
    if "labeled" in _types(events, "pull_request"):
        for step in steps(workflow):
            ref = step.get("with", {}).get("ref")
            if step.get("uses", "").startswith("actions/checkout@") and (
                ref != "${{ github.event.pull_request.head.sha }}"
            ):
                yield "a labelled run checks out something else than the labelled commit"
    if "pull_request_target" in events and re.search(
        r"checkout|fetch|clone|pull/|nox|assay ", text
    ):
        yield "pull_request_target touches code of the pull request"


def _types(events: Any, name: str) -> set[str]:
    if not isinstance(events, dict) or not isinstance(events.get(name), dict):
        return set()
    return set(events[name].get("types", []))


def _pin_violations(text: str) -> Iterator[str]:
    for line in re.findall(r"uses: .*", text):
        if not PINNED_ACTION.fullmatch(line):
            yield f"not pinned by commit with its version: {line}"


def workflow_texts(root: Path) -> dict[str, str]:
    texts = {
        path.name: path.read_text(encoding="utf-8")
        for path in sorted((root / ".github").rglob("*.y*ml"))
    }
    assert {"ci.yml", "smoke.yml", "nightly.yml"} <= set(texts)
    return texts


def test_workflows_keep_the_rules(root: Path) -> None:
    found = {name: violations(text) for name, text in workflow_texts(root).items()}
    assert {name: broken for name, broken in found.items() if broken} == {}


@pytest.mark.parametrize(
    ("file", "old", "new", "violation"),
    [
        ("ci.yml", "permissions: {}", "permissions: read-all", "permissions at the top"),
        ("ci.yml", "timeout-minutes: 30", "", "tests has no timeout"),
        ("ci.yml", " # v7.0.1", "", "not pinned"),
        ("ci.yml", "@3d3c42e5aac5ba805825da76410c181273ba90b1", "@v7", "not pinned"),
        ("ci.yml", "persist-credentials: false", "fetch-depth: 1", "keeps its credentials"),
        ("ci.yml", "python-version:", "cache: pip\n          python-version:", "a cache"),
        ("ci.yml", 'nox -s "$SESSION"', "nox -s ${{ matrix.session }}", "reaches the shell"),
        ("ci.yml", "run: pip install nox", "run: make all", "logic in a workflow"),
        ("ci.yml", "run: pip install nox", "run: pip install nox; id", "logic in a workflow"),
        ("ci.yml", "\njobs:", "\nconcurrency: x\njobs:", "concurrency of a workflow"),
        ("smoke.yml", "[labeled]", "[labeled, synchronize]", "older commit"),
        ("smoke.yml", "ref: ${{ github.event.pull_request.head.sha }}", "ref: main", "something"),
        ("smoke.yml", "head.sha", "head.ref", "a branch name"),
        ("smoke.yml", "concurrency:", "defaults:", "no concurrency group"),
        ("nightly.yml", "persist-credentials: false", "fetch-depth: 1", "keeps its credentials"),
        ("labels.yml", "gh api", "git fetch origin pull/1/head\n          gh api", "touches code"),
    ],
)
def test_a_planted_violation_is_found(
    root: Path, file: str, old: str, new: str, violation: str
) -> None:
    text = workflow_texts(root)[file]
    assert old in text
    assert any(violation in found for found in violations(text.replace(old, new)))


def test_ci_runs_the_sessions_that_nox_alone_runs(root: Path) -> None:
    noxfile = importlib.import_module("noxfile")
    ci = parse(workflow_texts(root)["ci.yml"])
    assert ci["jobs"]["tests"]["strategy"]["matrix"]["session"] == noxfile.nox.options.sessions


def sessions_run(text: str) -> set[str]:
    """The sessions that a workflow names, in a command or in its matrix."""
    jobs = parse(text)["jobs"].values()
    named = {
        name
        for job in jobs
        for name in job.get("strategy", {}).get("matrix", {}).get("session", ())
    }
    commands = re.findall(r"nox -s ([\w -]+)$", text, re.MULTILINE)
    return named | {name for command in commands for name in command.split()}


def test_every_session_is_run_by_a_workflow(root: Path) -> None:
    importlib.import_module("noxfile")
    defined = {name.split("(", maxsplit=1)[0] for name in nox.registry.get()}
    run = set[str]().union(*map(sessions_run, workflow_texts(root).values()))
    assert defined - run == set()


def test_what_is_long_runs_at_night_and_on_demand(root: Path) -> None:
    text = workflow_texts(root)["nightly.yml"]
    assert {"faults", "false-alarms", "perf"} <= sessions_run(text)
    assert set(parse(text)["on"]) == {"schedule", "workflow_dispatch"}


def test_one_job_stands_for_all_of_ci(root: Path) -> None:
    jobs = parse(workflow_texts(root)["ci.yml"])["jobs"]
    required = jobs.pop("required")
    assert required["if"] == "always()"
    assert required["needs"] == list(jobs)


def test_a_labelled_run_fails_without_its_hardware(root: Path) -> None:
    smoke = parse(workflow_texts(root)["smoke.yml"])["jobs"]["smoke"]
    # Every label promises an accelerator but that of machines which have none.
    promised = "${{ github.event.label.name == 'assay-cpu' && '0' || '1' }}"
    assert smoke["env"]["ASSAY_REQUIRE_HARDWARE"] == promised
    assert smoke["timeout-minutes"] <= 60
    group = smoke["concurrency"]["group"]
    for key in ("pull_request.number", "pull_request.head.sha", "label.name"):
        assert key in group
