"""Rules about relations: what a workflow may have depends on its other jobs, its callers and its events."""

import re
from collections.abc import Iterator
from difflib import get_close_matches

from assay_runners.checking.workflow_documents import (
    Context,
    Document,
    Job,
    Problem,
    Step,
    called_file,
    expressions_in,
    find_scalars,
    mentions,
)
from assay_runners.planning.rules import RELEASE, RELEASE_TAGS

_ACCELERATOR = "accelerator.yml"
_HEAD = "github.event.pull_request.head.sha"
_COMPARISON = 'test "$(git rev-parse HEAD)" = "$SHA"'
_COMMIT = re.compile(r"@[0-9a-f]{40}$")
_VERSION = re.compile(r"# v\d+\.\d+\.\d+\s*$")


def pushes(document: Document, context: Context) -> Iterator[Problem]:
    """Require that only a push to the protected branch, or the tag of a release, starts a workflow."""
    branches = {"branches": [context.fleet.github.protected_ref]}
    allowed = {"tags": [RELEASE_TAGS]} if document.name == RELEASE else branches
    push = document.events.get("push")
    if push is not None and push != allowed:
        ((key, names),) = allowed.items()
        yield document.line_of("on"), f"other pushes start this; write {key}: [{', '.join(names)}]"


def schedules(document: Document, context: Context) -> Iterator[Problem]:
    """Require the schedules of runners/github.toml, by which the planner recognizes the workflow."""
    github = context.fleet.github
    known = {"nightly.yml": github.nightly, "reaper.yml": github.reaper}
    if "schedule" in document.events and document.crons != [known.get(document.name)]:
        has = known.get(document.name)
        message = f"its crons are {document.crons}; runners/github.toml has {has!r}"
        yield document.line_of("on"), message


def called_alone(document: Document, _: Context) -> Iterator[Problem]:
    """Require that only other workflows start a called one: a person could enter any commit."""
    others = document.events.keys() - {"workflow_call"}
    if "workflow_call" in document.events and others:
        message = f"{', '.join(sorted(others))} would start it without the commit of a caller"
        yield document.line_of("on"), message


def labels_without_new_commits(document: Document, context: Context) -> Iterator[Problem]:
    """Require that no push starts a workflow that reads labels: a label is valid for one commit."""
    types = document.types("pull_request")
    others = types - {"labeled"}
    if "labeled" in types and others:
        message = f"labeled and {', '.join(sorted(others))}: a push would run under an older label"
        yield document.line_of("on"), message
    elif others:
        for asking in _find_label_readers(document, context):
            message = f"{asking} reads labels, and a push starts it: a label is for one commit"
            yield document.line_of("on"), message


def no_foreign_code_with_write_access(document: Document, context: Context) -> Iterator[Problem]:
    """Forbid actions and calls in workflows of pull_request_target. The vocabulary lists commands."""
    if not context.calls.is_reached_by(document, "pull_request_target"):
        return
    for job in document.jobs.values():
        for user in (job, *job.steps):
            if user.uses:
                message = f"{user.uses} could run code of the author with a token that may write"
                yield user.line, message


def _find_label_readers(document: Document, context: Context) -> Iterator[str]:
    """Find the files with a condition on a label, among a workflow and all that it calls."""
    for other in context.workflows:
        if document.name not in context.calls.callers[other.name]:
            continue
        conditions = [
            " ".join(expressions_in(str(scalar.value), is_condition=True))
            for scalar in find_scalars(other.raw)
            if scalar.key == "if"
        ]
        read = ("github.event.label", "github.event.pull_request.labels")
        if any(mentions(condition, path) for condition in conditions for path in read):
            yield other.name


def labeled_commits(document: Document, context: Context) -> Iterator[Problem]:
    """Require under a label the commit that received it: `github.sha` is a later merge with main."""
    if not context.calls.is_reached_by_label(document):
        return
    for job in document.jobs.values():
        refs = [(job.inputs.get("sha"), job.line_of("with"))]
        refs += [(step.inputs.get("ref"), step.line) for step in job.steps if step.is_checkout]
        for ref, line in refs:
            if list(expressions_in(str(ref))) == ["github.sha"]:
                yield line, f"a label starts this, and {ref!r} is not its commit; write {_HEAD}"


def compared_commits(document: Document, context: Context) -> Iterator[Problem]:
    """Require that a job under a label verifies its commit before running anything from it."""
    if not context.calls.is_reached_by_label(document):
        return
    for job in document.jobs.values():
        for number, step in enumerate(job.steps):
            after = job.steps[number + 1] if number + 1 < len(job.steps) else None
            if number and step.is_checkout:
                yield step.line, "something runs before the checkout"
            if step.is_checkout and not _is_comparison(after, step, job.env):
                message = f"the next step must be `{_COMPARISON}`, with the checkout's ref as SHA"
                yield step.line, message


def _is_comparison(step: Step | None, checkout: Step, env: dict[str, object]) -> bool:
    if step is None or step.run.strip() != _COMPARISON or "if" in step.raw:
        return False
    sha, ref = step.env.get("SHA", env.get("SHA")), checkout.inputs.get("ref")
    return list(expressions_in(str(sha))) == list(expressions_in(str(ref)))


def named_versions(document: Document, _: Context) -> Iterator[Problem]:
    """Require the version of each foreign action, which updates of its commit read."""
    for step in document.steps:
        line = step.line_of("uses")
        if _COMMIT.search(step.uses) and not _VERSION.search(document.text.split("\n")[line - 1]):
            yield line, f"{step.uses} has no version; write it after the commit: # v1.2.3"


def guarded_machines(document: Document, context: Context) -> Iterator[Problem]:
    """Require calls of accelerator.yml at the protected branch, from workflows that an event starts."""
    github = context.fleet.github
    protected = f"{github.repository}/.github/workflows/{_ACCELERATOR}@{github.protected_ref}"
    for job in document.jobs.values():
        calls = called_file(job.uses) == _ACCELERATOR
        if calls and job.uses != protected:
            message = f"{job.uses} is not {protected}: a pull request could edit it"
            yield job.line_of("uses"), message
        if calls and "workflow_call" in document.events:
            message = f"other workflows can call {document.name}: its callers decide who approves"
            yield job.line_of("uses"), message
        if calls and "workflow_dispatch" in document.events:
            yield from _find_missing_approval(document, job)


def known_needs(document: Document, _: Context) -> Iterator[Problem]:
    """Require that a job waits for existing jobs: otherwise GitHub rejects the whole file."""
    for job in document.jobs.values():
        for name in job.needs:
            if name not in document.jobs:
                near = get_close_matches(name, document.jobs, n=1)
                nearest = f"; nearest is {near[0]}" if near else ""
                message = f"{job.id} needs the job {name!r}, which does not exist{nearest}"
                yield job.line_of("needs"), message


def tests_first(document: Document, _: Context) -> Iterator[Problem]:
    """Require that all jobs that do not precede the job `tests` wait for it."""
    tests = document.jobs.get("tests")
    if tests is None:
        return
    free = {"tests", *_find_predecessors(document, tests)}
    for job in document.jobs.values():
        if job.id not in free and "tests" not in _find_predecessors(document, job):
            yield job.line_of("needs"), f"{job.id} does not wait for the job `tests`"


def groups_of_labels(document: Document, context: Context) -> Iterator[Problem]:
    """Require that no label cancels a job of another label, commit or pull request."""
    if not context.calls.is_reached_by_label(document):
        return
    for job in document.jobs.values():
        group = job.raw.get("concurrency")
        name = str(group.get("group", "") if isinstance(group, dict) else group or "")
        expression = " ".join(expressions_in(name))
        for part, pattern in _PARTS_OF_GROUPS.items():
            if name and not re.search(pattern, expression):
                message = f"{job.id} shares its group with others: add the {part}"
                yield job.line_of("concurrency"), message


_PARTS_OF_GROUPS = {
    "number of the pull request": r"pull_request\.number",
    "commit": "sha",
    "label or target": r"matrix\.target|inputs\.(target|machine)|label\.name",
}


def _find_predecessors(document: Document, job: Job) -> set[str]:
    """Find the jobs that `job` waits for, directly or indirectly."""
    before: set[str] = set()
    waiting = list(job.needs)
    while waiting:
        name = waiting.pop()
        if name in document.jobs and name not in before:
            before.add(name)
            waiting += document.jobs[name].needs
    return before


def _find_missing_approval(document: Document, job: Job) -> Iterator[Problem]:
    """Find a manually started job that no reviewer approves."""
    environment = document.name.rsplit(".", 1)[0]
    before = _find_predecessors(document, job)
    if not any(document.jobs[name].environment == environment for name in before):
        message = f"{job.id} waits for no job with the environment {environment} and its reviewers"
        yield job.line, message
