"""Which commit a job runs."""

from collections.abc import Iterator

from assay_runners.checking.context import Context, expressions_of, make_finding
from assay_runners.checking.findings import Finding
from assay_runners.checking.workflow_files.documents import Step
from assay_runners.checking.workflow_files.expressions import expressions_in, mentions

_HEAD = "github.event.pull_request.head.sha"
# By expressions, normalised: an exact commit, and whether it is one under a label, too. That of an input
# is as exact as what callers give, who are held to the same.
_EXACT = {
    "github.sha": False,
    "inputs.sha": True,
    _HEAD: True,
    f"{_HEAD}||github.sha": True,
}
_COMPARED = 'test "$(git rev-parse HEAD)" = "$SHA"'


def exact_commits(context: Context) -> Iterator[Finding]:
    """A checkout names an exact commit; under a label, the head that the label was given to."""
    rule = "checkout"
    for document in context.workflows:
        labelled = context.reach.is_reached_by_label(document)
        for job in document.jobs.values():
            given = job.given.get("sha")
            named = [] if given is None else [(given, job.line_of("with"))]
            named += [(one.given.get("ref"), one.line) for one in job.steps if one.is_checkout]
            for ref, line in named:
                exact = _exact(ref)
                if exact is None:
                    message = f"{ref!r} is no exact commit; write one of {', '.join(_EXACT)}"
                    yield make_finding(rule, document, line, message)
                elif labelled and not exact:
                    message = f"a label starts this, and {ref!r} is not what it was given to; write {_HEAD}"
                    yield make_finding(rule, document, line, message)
        for step in document.steps:
            if step.is_checkout and step.given.get("repository") is not None:
                yield make_finding(
                    rule, document, step.line, "another repository's code is checked out"
                )


def compared_commits(context: Context) -> Iterator[Finding]:
    """Where a label starts it, the commit is compared before anything of it runs."""
    for document in context.workflows:
        if not context.reach.is_reached_by_label(document):
            continue
        for job in document.jobs.values():
            for number, step in enumerate(job.steps):
                after = job.steps[number + 1] if number + 1 < len(job.steps) else None
                if number and step.is_checkout:
                    message = "something runs before the commit is there"
                    yield make_finding("commit-compared", document, step.line, message)
                if step.is_checkout and not _compares(after, step, job.env):
                    message = (
                        f"the next step has to be `{_COMPARED}`, with SHA as the checkout's ref"
                    )
                    yield make_finding("commit-compared", document, step.line, message)


def no_branch_names(context: Context) -> Iterator[Finding]:
    """No expression reads the name of a branch of a pull request: it moves, and others choose it."""
    names = (
        "github.head_ref", "github.event.pull_request.head.ref",
        "github.event.pull_request.head.label", "github.event.workflow_run.head_branch",
    )  # fmt: skip
    for document in context.documents:
        for leaf, expression in expressions_of(document):
            for name in names:
                if mentions(expression, name):
                    message = f"{name} is a name, chosen by others; write {_HEAD}"
                    yield make_finding("branch-name", document, leaf.line, message)


def no_kept_credentials(context: Context) -> Iterator[Finding]:
    """A checkout leaves no token behind."""
    for document in context.documents:
        for step in document.steps:
            if step.is_checkout and step.given.get("persist-credentials") is not False:
                message = "the token stays on the machine; write `persist-credentials: false`"
                yield make_finding("credentials", document, step.line, message)


def _exact(ref: object) -> bool | None:
    """Whether it is exact under a label, too; None if it is not exact at all."""
    if not isinstance(ref, str) or not (ref.startswith("${{") and ref.endswith("}}")):
        return None
    expressions = list(expressions_in(ref))
    return _EXACT.get(expressions[0]) if len(expressions) == 1 else None


def _compares(step: Step | None, checkout: Step, env: dict[str, object]) -> bool:
    if step is None or step.run.strip() != _COMPARED or "if" in step.raw:
        return False
    sha = step.env.get("SHA", env.get("SHA"))
    return _normal(sha) == _normal(checkout.given.get("ref"))


def _normal(value: object) -> list[str]:
    return list(expressions_in(str(value)))
