"""The events that start workflows."""

from collections.abc import Iterator

from assay_runners.checking.context import Context, Finding, expressions_of, make_finding
from assay_runners.checking.workflow_files.documents import Document
from assay_runners.checking.workflow_files.expressions import mentions

# The events that the planner has rules for.
_PLANNED = {
    "pull_request", "pull_request_target", "push", "merge_group", "schedule",
    "workflow_dispatch", "workflow_call",
}  # fmt: skip


def known_events(context: Context) -> Iterator[Finding]:
    """Require events that the planner knows: a comment or another run refers to no commit."""
    for document in context.workflows:
        for event in [*document.events] or ["no event"]:
            if event not in _PLANNED:
                message = (
                    f"the planner has no rule for {event}, only for {', '.join(sorted(_PLANNED))}"
                )
                yield make_finding("event", document, document.line_of("on"), message)
        push = document.events.get("push")
        if push is not None and push.get("branches") != [context.fleet.github.protected_ref]:
            message = f"a push to any branch starts this; write branches: [{context.fleet.github.protected_ref}]"
            yield make_finding("event", document, document.line_of("on"), message)


def schedules(context: Context) -> Iterator[Finding]:
    """Require the schedules of runners/github.toml, by which the planner recognizes the workflow."""
    github = context.fleet.github
    known = {"nightly.yml": github.nightly, "reaper.yml": github.reaper}
    for document in context.workflows:
        if "schedule" in document.events:
            crons = [one.get("cron") for one in document.events["schedule"].get("crons") or ()]
            if crons != [known.get(document.name)]:
                message = (
                    f"its crons are {crons}; runners/github.toml has {known.get(document.name)!r}"
                )
                yield make_finding("schedule", document, document.line_of("on"), message)


def called_alone(context: Context) -> Iterator[Finding]:
    """Require that only other workflows start a called one: a person could enter any commit."""
    for document in context.workflows:
        others = document.events.keys() - {"workflow_call"}
        if "workflow_call" in document.events and others:
            message = f"{', '.join(sorted(others))} would start it without the commit of a caller"
            yield make_finding("called-alone", document, document.line_of("on"), message)


def labels_without_new_commits(context: Context) -> Iterator[Finding]:
    """Require that no push starts a workflow that reads labels: a label is valid for one commit."""
    for document in context.workflows:
        types = document.types("pull_request")
        others = types - {"labeled"}
        if "labeled" in types and others:
            message = (
                f"labeled and {', '.join(sorted(others))}: a push would run under an older label"
            )
            yield make_finding("label-and-push", document, document.line_of("on"), message)
        elif others:
            for asking in _find_label_readers(document, context):
                message = (
                    f"{asking} reads labels, and a push starts it: the label is for an older commit"
                )
                yield make_finding("label-and-push", document, document.line_of("on"), message)


def no_foreign_code_with_write_access(context: Context) -> Iterator[Finding]:
    """Forbid code in workflows of pull_request_target: actions, calls and downloads."""
    for document in context.workflows:
        if not context.calls.is_reached_by(document, "pull_request_target"):
            continue
        for job in document.jobs.values():
            for uses, line in [(job.uses, job.line)] + [
                (step.uses, step.line) for step in job.steps
            ]:
                if uses:
                    message = (
                        f"{uses} could run code of the pull request with a token that may write"
                    )
                    yield make_finding("pull-request-target", document, line, message)
            for step in job.steps:
                words = [word for word in _FETCHING if word in step.run.lower()]
                if words:
                    message = (
                        f"`{words[0].strip()}` fetches or runs code with a token that may write"
                    )
                    yield make_finding(
                        "pull-request-target", document, step.line_of("run"), message
                    )


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
