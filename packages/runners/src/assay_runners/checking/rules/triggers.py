"""What starts a workflow."""

from collections.abc import Iterator

from assay_runners.checking.context import Context, expressions_of, make_finding
from assay_runners.checking.findings import Finding
from assay_runners.checking.workflow_files.documents import Document
from assay_runners.checking.workflow_files.expressions import mentions

# Events that the planner has rules for.
_PLANNED = {
    "pull_request", "pull_request_target", "push", "merge_group", "schedule",
    "workflow_dispatch", "workflow_call",
}  # fmt: skip


def known_events(context: Context) -> Iterator[Finding]:
    """Only events that the planner knows: a comment, or another run, says nothing of a commit."""
    for document in context.workflows:
        for event in [*document.events] or ["no event"]:
            if event not in _PLANNED:
                message = (
                    f"{event} starts this; the planner has rules for {', '.join(sorted(_PLANNED))}"
                )
                yield make_finding("event", document, document.line_of("on"), message)
        push = document.events.get("push")
        if push is not None and push.get("branches") != [context.fleet.github.protected_ref]:
            message = f"a push starts this anywhere; write branches: [{context.fleet.github.protected_ref}]"
            yield make_finding("event", document, document.line_of("on"), message)


def schedules(context: Context) -> Iterator[Finding]:
    """A schedule is one of runners/github.toml, for the planner answers by it."""
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
    """What is there to be called is started by nothing else: a person could type any commit."""
    for document in context.workflows:
        others = document.events.keys() - {"workflow_call"}
        if "workflow_call" in document.events and others:
            message = f"{', '.join(sorted(others))} would start it without a caller's commit"
            yield make_finding("called-alone", document, document.line_of("on"), message)


def labels_without_new_commits(context: Context) -> Iterator[Finding]:
    """A label is for the commit it was given to: nothing that asks for one is started by a push."""
    for document in context.workflows:
        types = document.types("pull_request")
        others = types - {"labeled"}
        if "labeled" in types and others:
            message = f"labeled and {', '.join(sorted(others))}: a push would run on an older label"
            yield make_finding("label-and-push", document, document.line_of("on"), message)
        elif others:
            for asking in _asking_for_labels(document, context):
                message = f"{asking} asks for a label, and a push starts it: the label is an older commit's"
                yield make_finding("label-and-push", document, document.line_of("on"), message)


def nothing_of_others_with_write_access(context: Context) -> Iterator[Finding]:
    """A workflow of pull_request_target brings no code: no action, no call, no download."""
    for document in context.workflows:
        if not context.reach.is_reached_by(document, "pull_request_target"):
            continue
        for job in document.jobs.values():
            for uses, line in [(job.uses, job.line)] + [
                (step.uses, step.line) for step in job.steps
            ]:
                if uses:
                    message = f"{uses} could bring code of the pull request, beside a token that may write"
                    yield make_finding("pull-request-target", document, line, message)
            for step in job.steps:
                fetching = [word for word in _BRINGING if word in step.run.lower()]
                if fetching:
                    message = f"`{fetching[0].strip()}` brings or runs code, beside a token that may write"
                    yield make_finding(
                        "pull-request-target", document, step.line_of("run"), message
                    )


_BRINGING = (
    "git ", "checkout", "clone", "fetch", "pull/", "curl", "wget", "download", "nox", "assay ",
    "pip", "npm", "make", "python", "bash", "sh ", "eval", "source ", "docker",
)  # fmt: skip


def _asking_for_labels(document: Document, context: Context) -> Iterator[str]:
    """The files, of a workflow and all that it calls, in which a condition reads a label."""
    for other in context.workflows:
        if document.name not in context.reach.callers[other.name]:
            continue
        for leaf, expression in expressions_of(other):
            read = ("github.event.label", "github.event.pull_request.labels")
            if leaf.key == "if" and any(mentions(expression, path) for path in read):
                yield other.name
                break
