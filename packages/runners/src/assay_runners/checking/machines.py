"""On which machines jobs run, for how long, and beside which others."""

import re
from collections.abc import Iterator
from itertools import zip_longest

from assay_runners.checking.context import Context, found
from assay_runners.checking.expressions import expressions_in, normalise
from assay_runners.checking.findings import Finding
from assay_runners.checking.reach import called_file
from assay_runners.checking.reading import Document, Job

_ACCELERATOR, _ON_THE_MACHINE = "accelerator.yml", "run"
_LABEL = "format('assay-{0}',inputs.target)"
_LONGEST_MINUTES = 360
# Its runs end when a newer commit is there; whatever starts it is a commit.
_SUPERSEDED = "ci.yml"
# What accelerator.yml asks the event itself. To the letter: a condition with an alternative more
# contains all of these words.
_GUARD = """
github.event_name == 'workflow_dispatch'
|| (
  github.event_name == 'pull_request'
  && github.event.action == 'labeled'
  && github.event.pull_request.state == 'open'
  && github.event.sender.type == 'User'
  && inputs.tier != 'bench'
  && (
    github.event.pull_request.head.repo.full_name == github.repository
    || github.event.sender.login != github.event.pull_request.user.login
  )
  && (
    github.event.label.name == format('{0}:{1}', inputs.tier, inputs.target)
    || github.event.label.name == format('{0}:all', inputs.tier)
  )
)
"""


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
                wanted = {"group": github.runner_group, "labels": _LABEL}
                if not isinstance(runs_on, dict) or _normalised(runs_on) != wanted:
                    message = (
                        f"it has to be the group {github.runner_group} and `${{{{ {_LABEL} }}}}`"
                    )
                    yield found(rule, document, line, message)
            elif _is_for_other_repositories(document, context):
                continue  # the caller names its own machine
            elif runs_on != github.hosted:
                known = [one.label for one in context.fleet.runners()]
                message = f"{_shown(runs_on)} is not {github.hosted}; machines with accelerators ({known[0]}, …) take jobs of {_ACCELERATOR} alone"
                yield found(rule, document, line, message)


def guarded_machines(context: Context) -> Iterator[Finding]:
    """accelerator.yml trusts nothing it is given, and is called at the protected branch."""
    rule = "machine-guard"
    for document in context.workflows:
        for job in document.jobs.values():
            calls = called_file(job.uses) == _ACCELERATOR
            if calls and job.uses != context.accelerator:
                message = f"{job.uses} is not {context.accelerator}: a pull request could edit it"
                yield found(rule, document, job.line_of("uses"), message)
            if document.name == _ACCELERATOR and job.id == _ON_THE_MACHINE:
                yield from _unguarded(document, job)
            if calls and "workflow_dispatch" in document.events:
                yield from _unapproved(document, job)
    on_machines = [one.jobs for one in context.workflows if one.name == _ACCELERATOR]
    if not any(_ON_THE_MACHINE in jobs for jobs in on_machines):
        file = f".github/workflows/{_ACCELERATOR}"
        yield Finding(file, 1, rule, f"there is no such workflow with a job {_ON_THE_MACHINE}")


def timeouts(context: Context) -> Iterator[Finding]:
    """Every job ends by itself: a machine that hangs costs until somebody looks."""
    for document in context.workflows:
        for job in document.jobs.values():
            minutes = job.raw.get("timeout-minutes")
            given = isinstance(minutes, str) and "${{" in minutes
            counted = isinstance(minutes, int) and 0 < minutes <= _LONGEST_MINUTES
            if not job.uses and not given and not counted:
                message = (
                    f"{job.id} has timeout-minutes {minutes}; write at most {_LONGEST_MINUTES}"
                )
                yield found("timeout", document, job.line, message)


def concurrency(context: Context) -> Iterator[Finding]:
    """Groups belong to jobs, and a job on a machine is not cancelled by another label."""
    rule = "concurrency"
    for document in context.workflows:
        labelled = context.reach.is_reached_by_label(document)
        if "concurrency" in document.raw and (labelled or document.name != _SUPERSEDED):
            message = "of a workflow it cancels before any `if` is read; write it at each job"
            yield found(rule, document, document.line_of("concurrency"), message)
        for job in document.jobs.values():
            group = job.raw.get("concurrency")
            line = job.line_of("concurrency")
            if group is None and not job.uses:
                yield found(rule, document, job.line, f"{job.id} has no group")
            elif labelled and group is not None:
                yield from (
                    found(rule, document, line, f"{job.id} {problem}")
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
    if not re.search(r"matrix\.|inputs\.target|label\.name", expression):
        yield "shares its group with other labels; put the label or the target into it"


def _unguarded(document: Document, job: Job) -> Iterator[Finding]:
    rule = "machine-guard"
    given, guard = normalise(str(job.raw.get("if") or "")), normalise(_GUARD)
    if given != guard:
        pairs = enumerate(zip_longest(given, guard))
        kept = next(place for place, (one, other) in pairs if one != other)
        message = f"the condition of {job.id} is not that of checking/machines.py from here on: {given[kept:][:60]!r}; it has {guard[kept:][:60]!r}"
        yield found(rule, document, job.line_of("if"), message)
    if [*expressions_in(job.environment)] != [_LABEL]:
        message = f"the environment has to be the label itself: ${{{{ {_LABEL} }}}}"
        yield found(rule, document, job.line_of("environment"), message)


def _unapproved(document: Document, job: Job) -> Iterator[Finding]:
    """What is started by hand waits for reviewers before it is planned."""
    environment = document.name.rsplit(".", 1)[0]
    before: set[str] = set()
    waiting = list(job.needs)
    while waiting:
        name = waiting.pop()
        if name in document.jobs and name not in before:
            before.add(name)
            waiting += document.jobs[name].needs
    if not any(document.jobs[name].environment == environment for name in before):
        message = (
            f"{job.id} comes after no job with the environment {environment}, which has reviewers"
        )
        yield found("machine-guard", document, job.line, message)


def _is_for_other_repositories(document: Document, context: Context) -> bool:
    alone = context.reach.callers[document.name] == {document.name}
    return set(document.events) == {"workflow_call"} and alone


def _normalised(runs_on: dict[str, object]) -> dict[str, str]:
    found_of = {}
    for key, value in runs_on.items():
        expressions = list(expressions_in(str(value)))
        found_of[str(key)] = expressions[0] if expressions else str(value)
    return found_of


def _shown(runs_on: object) -> str:
    return repr(dict(runs_on) if isinstance(runs_on, dict) else runs_on)
