"""The events that start workflows."""

from collections.abc import Iterator

from assay_runners.checking.context import Context, Problem, expressions_of
from assay_runners.checking.workflow_files.documents import Document
from assay_runners.checking.workflow_files.scalars import mentions
from assay_runners.planning.rules import RELEASE, RELEASE_TAGS

# The events that the planner has rules for.
_PLANNED = {
    "pull_request", "pull_request_target", "push", "merge_group", "schedule",
    "workflow_dispatch", "workflow_call",
}  # fmt: skip


def known_events(document: Document, context: Context) -> Iterator[Problem]:
    """Require events that the planner knows: a comment or another run refers to no commit."""
    for event in [*document.events] or ["no event"]:
        if event not in _PLANNED:
            message = f"the planner has no rule for {event}, only for {', '.join(sorted(_PLANNED))}"
            yield document.line_of("on"), message
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
    """Forbid code in workflows of pull_request_target: actions, calls and downloads."""
    if not context.calls.is_reached_by(document, "pull_request_target"):
        return
    for job in document.jobs.values():
        for user in (job, *job.steps):
            if user.uses:
                message = f"{user.uses} could run code of the author with a token that may write"
                yield user.line, message
        for step in job.steps:
            words = [word for word in _FETCHING if word in step.run.lower()]
            if words:
                message = f"`{words[0].strip()}` fetches or runs code with a token that may write"
                yield step.line_of("run"), message


_FETCHING = (
    "git ", "checkout", "clone", "fetch", "pull/", "curl", "wget", "download", "nox", "assay ",
    "pip", "npm", "make", "python", "bash", "sh ", "eval", "source ", "docker",
)  # fmt: skip


def _find_label_readers(document: Document, context: Context) -> Iterator[str]:
    """Find the files with a condition on a label, among a workflow and all that it calls."""
    for other in context.workflows:
        if document.name not in context.calls.callers[other.name]:
            continue
        for scalar, expression in expressions_of(other):
            read = ("github.event.label", "github.event.pull_request.labels")
            if scalar.key == "if" and any(mentions(expression, path) for path in read):
                yield other.name
                break
