"""The permissions of tokens, secrets and caches."""

from collections.abc import Iterator

from assay_runners.checking.context import PULL_REQUEST_EVENTS, Context, Problem, expressions_of
from assay_runners.checking.rules.vocabulary import read_vocabulary
from assay_runners.checking.workflow_files.documents import Document, Job
from assay_runners.checking.workflow_files.scalars import mentions


def permissions_of_workflows(document: Document, _: Context) -> Iterator[Problem]:
    """Require the permissions `{}` of a workflow, and an explicit list for each job."""
    top = document.raw.get("permissions")
    if top != {}:
        message = f"the workflow has {top!r}; write `permissions: {{}}`"
        yield document.line_of("permissions"), message
    for job in document.jobs.values():
        own = job.raw.get("permissions")
        if isinstance(own, str):
            message = f"{job.id} has {own!r}; name each permission that it needs"
            yield job.line_of("permissions"), message
        elif own is None:
            yield job.line, f"{job.id} has none; write the permissions that it needs, or {{}}"


def no_write_but_listed(document: Document, _: Context) -> Iterator[Problem]:
    """Forbid write permissions that the vocabulary does not list for the job."""
    for job in document.jobs.values():
        listed = read_vocabulary()["writing"].get(f"{document.name} {job.id}", [])
        own = job.raw.get("permissions")
        writes = own.items() if isinstance(own, dict) else ()
        for name in (str(name) for name, level in writes if level == "write"):
            if name not in listed:
                message = f"{job.id} may write {name}, and [writing] in the vocabulary lacks it"
                yield job.line_of("permissions"), message


def no_secret_for_others(document: Document, context: Context) -> Iterator[Problem]:
    """Forbid secrets and tokens in a job that runs code of a pull request."""
    is_reached = document in context.actions or context.calls.is_reached_by(
        document, *PULL_REQUEST_EVENTS
    )
    for scalar, expression in expressions_of(document):
        parts = scalar.place.split(".")
        job = document.jobs.get(parts[1]) if parts[0] == "jobs" else None
        if mentions(expression, "secrets"):
            if is_reached or job is None or not job.environment:
                where = "a pull request reaches it" if is_reached else "no environment guards it"
                yield scalar.line, f"it reads a secret, and {where}; use an OIDC identity"
        elif is_reached and mentions(expression, "github.token") and _runs_code(job):
            message = "code of a pull request can read the token; move it to a job without code"
            yield scalar.line, message
    for job in document.jobs.values():
        if "secrets" in job.raw:
            yield job.line_of("secrets"), f"{job.id} passes secrets to the workflow that it calls"


def no_caches(document: Document, _: Context) -> Iterator[Problem]:
    """Forbid caches: main would read what a pull request writes into one."""
    for step in document.steps:
        given = [
            key
            for key, value in step.inputs.items()
            if "cache" in str(key).lower() and value not in (False, "", "false", None)
        ]
        action = step.uses.partition("@")[0].lower()
        if given or "cache" in action:
            cache = ", ".join(map(str, given)) or action
            yield step.line, f"{cache}: main reads a cache that a pull request writes; remove it"


def _runs_code(job: Job | None) -> bool:
    """Check that it uses an action or calls a workflow, which may check out a commit."""
    return job is None or bool(job.uses) or any(step.uses for step in job.steps)
