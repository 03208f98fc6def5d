"""The machines of jobs, their time limits and their concurrency groups."""

import re
from collections.abc import Iterator
from difflib import get_close_matches

from assay_runners.checking.context import Context, Problem, called_file
from assay_runners.checking.rules.vocabulary import MAX_MINUTES
from assay_runners.checking.workflow_files.documents import Document, Job
from assay_runners.checking.workflow_files.scalars import expressions_in

_ACCELERATOR, _ON_THE_MACHINE = "accelerator.yml", "run"
_FOR_OTHER_REPOSITORIES = "check.yml"
# A newer commit cancels its runs; only commits start it.
_SUPERSEDED = "ci.yml"


def known_machines(document: Document, context: Context) -> Iterator[Problem]:
    """Require GitHub-hosted machines, and in accelerator.yml the runner group."""
    github = context.fleet.github
    for job in document.jobs.values():
        if job.uses or document.name == _FOR_OTHER_REPOSITORIES:
            continue  # the caller of check.yml names its own machine
        runs_on = job.raw.get("runs-on")
        line = job.line_of("runs-on")
        if document.name == _ACCELERATOR and job.id == _ON_THE_MACHINE:
            if runs_on != {"group": github.runner_group, "labels": job.environment}:
                message = f"{_show(runs_on)} is not the group {github.runner_group} with the environment {job.environment!r} as its label"
                yield line, message
        elif runs_on != github.hosted:
            known = [one.label for one in context.fleet.runners()]
            message = f"{_show(runs_on)} is not {github.hosted}; machines with accelerators ({known[0]}, …) accept only jobs of {_ACCELERATOR}"
            yield line, message


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


def timeouts(document: Document, _: Context) -> Iterator[Problem]:
    """Require a time limit for every job: a hung machine costs money until somebody notices."""
    for job in document.jobs.values():
        minutes = job.raw.get("timeout-minutes")
        given = isinstance(minutes, str) and "${{" in minutes
        counted = isinstance(minutes, int) and 0 < minutes <= MAX_MINUTES
        if not job.uses and not given and not counted:
            has = "missing" if minutes is None else repr(minutes)
            message = f"timeout-minutes of {job.id}: {has}; write a number up to {MAX_MINUTES}, such as 45"
            yield job.line, message


def concurrency(document: Document, context: Context) -> Iterator[Problem]:
    """Require a concurrency group for each job, and that no label cancels a job of another label."""
    labeled = context.calls.is_reached_by_label(document)
    if "concurrency" in document.raw and (labeled or document.name != _SUPERSEDED):
        message = "a group of the workflow cancels before any `if` is read; write one for each job"
        yield document.line_of("concurrency"), message
    for job in document.jobs.values():
        group = job.raw.get("concurrency")
        line = job.line_of("concurrency")
        if group is None and not job.uses:
            yield job.line, f"{job.id} has no group"
        elif labeled and group is not None:
            for problem in _find_group_problems(group):
                yield line, f"{job.id} {problem}"


def _find_group_problems(group: object) -> Iterator[str]:
    """Find the problems of the concurrency group of a job that a label starts."""
    cancels = group.get("cancel-in-progress", False) if isinstance(group, dict) else False
    name = str(group.get("group", "") if isinstance(group, dict) else group)
    expression = " ".join(expressions_in(name))
    if cancels is not False:
        yield "is canceled by another label; write `cancel-in-progress: false`"
    if "pull_request.number" not in expression:
        yield "shares its group with other pull requests; add the number"
    if "sha" not in expression:
        yield "shares its group with other commits; add the commit"
    if not re.search(r"matrix\.target|inputs\.(target|machine)|label\.name", expression):
        yield "shares its group with other labels; add the label or the target"


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


def _show(runs_on: object) -> str:
    return repr(dict(runs_on) if isinstance(runs_on, dict) else runs_on)
