"""What the token of a job may do, and what else it could take with it."""

from collections.abc import Iterator

from assay_runners.checking.context import Context, expressions_of, make_finding
from assay_runners.checking.findings import Finding
from assay_runners.checking.rules.vocabulary import read_vocabulary
from assay_runners.checking.workflow_files.documents import Job
from assay_runners.checking.workflow_files.expressions import mentions
from assay_runners.checking.workflow_files.reach import OF_OTHERS


def permissions_of_workflows(context: Context) -> Iterator[Finding]:
    """The permissions of a workflow are `{}`; each job states its own, never all of them."""
    rule = "permissions"
    for document in context.workflows:
        top = document.raw.get("permissions")
        if top != {}:
            line = document.line_of("permissions")
            yield make_finding(
                rule, document, line, f"the workflow has {top!r}; write `permissions: {{}}`"
            )
        for job in document.jobs.values():
            own = job.raw.get("permissions")
            if isinstance(own, str):
                message = f"{job.id} has {own!r}; name each permission that it needs"
                yield make_finding(rule, document, job.line_of("permissions"), message)
            elif own is None:
                message = f"{job.id} states none; write those that it needs, or {{}}"
                yield make_finding(rule, document, job.line, message)


def no_write_but_listed(context: Context) -> Iterator[Finding]:
    """A job may write what the vocabulary says that it may, and no other job anything."""
    for document in context.workflows:
        for job in document.jobs.values():
            may = read_vocabulary()["writing"].get(f"{document.name} {job.id}", [])
            own = job.raw.get("permissions")
            writes = own.items() if isinstance(own, dict) else ()
            for name in (str(name) for name, level in writes if level == "write"):
                if name not in may:
                    message = f"{job.id} may write {name}, and no list of ours says so"
                    yield make_finding("write", document, job.line_of("permissions"), message)


def no_secret_for_others(context: Context) -> Iterator[Finding]:
    """No secret, and no token, is in reach of a job that runs code of a pull request."""
    rule = "secret"
    for document in context.documents:
        reached = document in context.actions or context.reach.is_reached_by(document, *OF_OTHERS)
        for leaf, expression in expressions_of(document):
            parts = leaf.place.split(".")
            job = document.jobs.get(parts[1]) if parts[0] == "jobs" else None
            if mentions(expression, "secrets"):
                if reached or job is None or not job.environment:
                    where = "a pull request reaches it" if reached else "no environment guards it"
                    message = f"a secret stands here and {where}; give the job an identity by OIDC"
                    yield make_finding(rule, document, leaf.line, message)
            elif (
                reached
                and mentions(expression, "github.token")
                and (job is None or _runs_code(job))
            ):
                message = "the token stands beside code of a pull request; move it to a job without"
                yield make_finding(rule, document, leaf.line, message)
        for job in document.jobs.values():
            if "secrets" in job.raw:
                message = f"{job.id} passes secrets to the workflow that it calls"
                yield make_finding(rule, document, job.line_of("secrets"), message)


def no_caches(context: Context) -> Iterator[Finding]:
    """Nothing saves a cache: what a pull request writes into one, main would read."""
    for document in context.documents:
        for step in document.steps:
            given = [
                key
                for key, value in step.given.items()
                if "cache" in str(key).lower() and value not in (False, "", "false", None)
            ]
            action = step.uses.partition("@")[0].lower()
            if given or "cache" in action:
                what = ", ".join(map(str, given)) or action
                message = (
                    f"{what}: a cache that a pull request writes is read by main; leave it out"
                )
                yield make_finding("cache", document, step.line, message)


def _runs_code(job: Job) -> bool:
    """Whether it brings a commit onto the machine, or calls a workflow or action that may."""
    return bool(job.uses) or any(step.uses for step in job.steps)
