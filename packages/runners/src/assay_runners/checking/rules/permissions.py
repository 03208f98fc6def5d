"""The permissions of tokens, secrets and caches."""

from collections.abc import Iterator

from assay_runners.checking.context import Context, Finding, expressions_of, make_finding
from assay_runners.checking.rules.vocabulary import read_vocabulary
from assay_runners.checking.workflow_files.call_graph import PULL_REQUEST_EVENTS
from assay_runners.checking.workflow_files.documents import Job
from assay_runners.checking.workflow_files.expressions import mentions


def permissions_of_workflows(context: Context) -> Iterator[Finding]:
    """Require the permissions `{}` of a workflow, and an explicit list for each job."""
    rule = "permissions"
    for document in context.workflows:
        top = document.raw.get("permissions")
        if top != {}:
            message = f"the workflow has {top!r}; write `permissions: {{}}`"
            yield make_finding(rule, document, document.line_of("permissions"), message)
        for job in document.jobs.values():
            own = job.raw.get("permissions")
            if isinstance(own, str):
                message = f"{job.id} has {own!r}; name each permission that it needs"
                yield make_finding(rule, document, job.line_of("permissions"), message)
            elif own is None:
                message = f"{job.id} has none; write the permissions that it needs, or {{}}"
                yield make_finding(rule, document, job.line, message)


def no_write_but_listed(context: Context) -> Iterator[Finding]:
    """Forbid write permissions that the vocabulary does not list for the job."""
    for document in context.workflows:
        for job in document.jobs.values():
            listed = read_vocabulary()["writing"].get(f"{document.name} {job.id}", [])
            own = job.raw.get("permissions")
            writes = own.items() if isinstance(own, dict) else ()
            for name in (str(name) for name, level in writes if level == "write"):
                if name not in listed:
                    message = f"{job.id} may write {name}, which [writing] of the vocabulary does not list"
                    yield make_finding("write", document, job.line_of("permissions"), message)


def no_secret_for_others(context: Context) -> Iterator[Finding]:
    """Forbid secrets and tokens in a job that runs code of a pull request."""
    rule = "secret"
    for document in context.documents:
        is_reached = document in context.actions or context.calls.is_reached_by(
            document, *PULL_REQUEST_EVENTS
        )
        for scalar, expression in expressions_of(document):
            parts = scalar.place.split(".")
            job = document.jobs.get(parts[1]) if parts[0] == "jobs" else None
            if mentions(expression, "secrets"):
                if is_reached or job is None or not job.environment:
                    where = (
                        "a pull request reaches it" if is_reached else "no environment guards it"
                    )
                    message = f"it reads a secret, and {where}; use an OIDC identity"
                    yield make_finding(rule, document, scalar.line, message)
            elif (
                is_reached
                and mentions(expression, "github.token")
                and (job is None or _runs_code(job))
            ):
                message = "code of a pull request can read the token; move it to a job without code"
                yield make_finding(rule, document, scalar.line, message)
        for job in document.jobs.values():
            if "secrets" in job.raw:
                message = f"{job.id} passes secrets to the workflow that it calls"
                yield make_finding(rule, document, job.line_of("secrets"), message)


def no_caches(context: Context) -> Iterator[Finding]:
    """Forbid caches: main would read what a pull request writes into one."""
    for document in context.documents:
        for step in document.steps:
            given = [
                key
                for key, value in step.inputs.items()
                if "cache" in str(key).lower() and value not in (False, "", "false", None)
            ]
            action = step.uses.partition("@")[0].lower()
            if given or "cache" in action:
                cache = ", ".join(map(str, given)) or action
                message = f"{cache}: main reads a cache that a pull request writes; remove it"
                yield make_finding("cache", document, step.line, message)


def _runs_code(job: Job) -> bool:
    """Check that it uses an action or calls a workflow, which may check out a commit."""
    return bool(job.uses) or any(step.uses for step in job.steps)
