"""On which machines jobs run, for how long, and beside which others."""

import re
from collections.abc import Iterator
from difflib import get_close_matches

from assay_runners.checking.context import Context, make_finding
from assay_runners.checking.findings import Finding
from assay_runners.checking.rules.vocabulary import MOST_MINUTES
from assay_runners.checking.workflow_files.documents import Document, Job
from assay_runners.checking.workflow_files.expressions import expressions_in
from assay_runners.checking.workflow_files.reach import called_file

_ACCELERATOR, _ON_THE_MACHINE = "accelerator.yml", "run"
_FOR_OTHER_REPOSITORIES = "check.yml"
# Its runs end when a newer commit is there; whatever starts it is a commit.
_SUPERSEDED = "ci.yml"


def known_machines(context: Context) -> Iterator[Finding]:
    """A job runs on GitHub's machines, or in accelerator.yml on those of the group."""
    rule = "machine"
    github = context.fleet.github
    for document in context.workflows:
        for job in document.jobs.values():
            if job.uses:
                continue
            runs_on = job.raw.get("runs-on")
            line = job.line_of("runs-on")
            if document.name == _ACCELERATOR and job.id == _ON_THE_MACHINE:
                if runs_on != {"group": github.runner_group, "labels": job.environment}:
                    message = f"{_shown(runs_on)} is not the group {github.runner_group} with the environment {job.environment!r} as its label"
                    yield make_finding(rule, document, line, message)
                continue
            if document.name == _FOR_OTHER_REPOSITORIES:
                continue  # the caller names its own machine
            if runs_on != github.hosted:
                known = [one.label for one in context.fleet.runners()]
                message = f"{_shown(runs_on)} is not {github.hosted}; machines with accelerators ({known[0]}, …) take jobs of {_ACCELERATOR} alone"
                yield make_finding(rule, document, line, message)


def guarded_machines(context: Context) -> Iterator[Finding]:
    """accelerator.yml is called at the protected branch, by what an event itself starts."""
    rule = "machine-guard"
    for document in context.workflows:
        for job in document.jobs.values():
            calls = called_file(job.uses) == _ACCELERATOR
            if calls and job.uses != context.accelerator:
                message = f"{job.uses} is not {context.accelerator}: a pull request could edit it"
                yield make_finding(rule, document, job.line_of("uses"), message)
            if calls and "workflow_call" in document.events:
                message = f"{document.name} is called itself: who approves depends on its callers"
                yield make_finding(rule, document, job.line_of("uses"), message)
            if calls and "workflow_dispatch" in document.events:
                yield from _unapproved(document, job)


def known_needs(context: Context) -> Iterator[Finding]:
    """A job waits for jobs that there are: GitHub refuses the whole file otherwise."""
    for document in context.workflows:
        for job in document.jobs.values():
            for name in job.needs:
                if name not in document.jobs:
                    near = get_close_matches(name, document.jobs, n=1)
                    nearest = f"; nearest is {near[0]}" if near else ""
                    message = f"{job.id} needs the job {name!r}, and there is none{nearest}"
                    yield make_finding("needs", document, job.line_of("needs"), message)


def tests_first(context: Context) -> Iterator[Finding]:
    """Where a workflow has a job `tests`, all that is not before it waits for it."""
    for document in context.workflows:
        tests = document.jobs.get("tests")
        if tests is None:
            continue
        free = {"tests", *_before(document, tests)}
        for job in document.jobs.values():
            if job.id not in free and "tests" not in _before(document, job):
                message = f"{job.id} does not wait for the job `tests`"
                yield make_finding("tests-first", document, job.line_of("needs"), message)


def timeouts(context: Context) -> Iterator[Finding]:
    """Every job ends by itself: a machine that hangs costs until somebody looks."""
    for document in context.workflows:
        for job in document.jobs.values():
            minutes = job.raw.get("timeout-minutes")
            given = isinstance(minutes, str) and "${{" in minutes
            counted = isinstance(minutes, int) and 0 < minutes <= MOST_MINUTES
            if not job.uses and not given and not counted:
                has = "none" if minutes is None else repr(minutes)
                message = f"timeout-minutes of {job.id}: {has}; write a number up to {MOST_MINUTES}, such as 45"
                yield make_finding("timeout", document, job.line, message)


def concurrency(context: Context) -> Iterator[Finding]:
    """Groups belong to jobs, and a job on a machine is not cancelled by another label."""
    rule = "concurrency"
    for document in context.workflows:
        labelled = context.reach.is_reached_by_label(document)
        if "concurrency" in document.raw and (labelled or document.name != _SUPERSEDED):
            message = "of a workflow it cancels before any `if` is read; write it at each job"
            yield make_finding(rule, document, document.line_of("concurrency"), message)
        for job in document.jobs.values():
            group = job.raw.get("concurrency")
            line = job.line_of("concurrency")
            if group is None and not job.uses:
                yield make_finding(rule, document, job.line, f"{job.id} has no group")
            elif labelled and group is not None:
                yield from (
                    make_finding(rule, document, line, f"{job.id} {problem}")
                    for problem in _problems(group)
                )


def _problems(group: object) -> Iterator[str]:
    """What is wrong with the group of a job that a label starts."""
    cancels = group.get("cancel-in-progress", False) if isinstance(group, dict) else False
    name = str(group.get("group", "") if isinstance(group, dict) else group)
    expression = " ".join(expressions_in(name))
    if cancels is not False:
        yield "is cancelled when another label is given; write `cancel-in-progress: false`"
    if "pull_request.number" not in expression:
        yield "shares its group with other pull requests; put the number into it"
    if "sha" not in expression:
        yield "shares its group with other commits; put the commit into it"
    if not re.search(r"matrix\.target|inputs\.(target|machine)|label\.name", expression):
        yield "shares its group with other labels; put the label or the target into it"


def _before(document: Document, job: Job) -> set[str]:
    """The jobs that `job` waits for, directly or not."""
    before: set[str] = set()
    waiting = list(job.needs)
    while waiting:
        name = waiting.pop()
        if name in document.jobs and name not in before:
            before.add(name)
            waiting += document.jobs[name].needs
    return before


def _unapproved(document: Document, job: Job) -> Iterator[Finding]:
    """What is started by hand waits for reviewers before it is planned."""
    environment = document.name.rsplit(".", 1)[0]
    if not any(document.jobs[name].environment == environment for name in _before(document, job)):
        message = (
            f"{job.id} comes after no job with the environment {environment}, which has reviewers"
        )
        yield make_finding("machine-guard", document, job.line, message)


def _shown(runs_on: object) -> str:
    return repr(dict(runs_on) if isinstance(runs_on, dict) else runs_on)
