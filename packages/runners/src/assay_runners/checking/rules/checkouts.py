"""The commit that a job runs."""

from collections.abc import Iterator

from assay_runners.checking.context import Context, Finding, expressions_of, make_finding
from assay_runners.checking.workflow_files.documents import Step
from assay_runners.checking.workflow_files.expressions import expressions_in, mentions

_HEAD = "github.event.pull_request.head.sha"
# The expressions, normalized, that name an exact commit, and whether they still do under a label.
# `inputs.sha` is as exact as the callers' value, and the callers have to keep the same rule.
_EXACT = {
    "github.sha": False,
    "inputs.sha": True,
    _HEAD: True,
    f"{_HEAD}||github.sha": True,
}
_COMPARISON = 'test "$(git rev-parse HEAD)" = "$SHA"'


def exact_commits(context: Context) -> Iterator[Finding]:
    """Require an exact commit in a checkout; under a label, the head that received the label."""
    rule = "checkout"
    for document in context.workflows:
        labeled = context.calls.is_reached_by_label(document)
        for job in document.jobs.values():
            given = job.inputs.get("sha")
            refs = [] if given is None else [(given, job.line_of("with"))]
            refs += [(one.inputs.get("ref"), one.line) for one in job.steps if one.is_checkout]
            for ref, line in refs:
                exact = _read_exactness(ref)
                if exact is None:
                    message = f"{ref!r} is not an exact commit; write one of {', '.join(_EXACT)}"
                    yield make_finding(rule, document, line, message)
                elif labeled and not exact:
                    message = (
                        f"a label starts this, and {ref!r} is not the labeled commit; write {_HEAD}"
                    )
                    yield make_finding(rule, document, line, message)
        for step in document.steps:
            if step.is_checkout and step.inputs.get("repository") is not None:
                message = "it checks out another repository"
                yield make_finding(rule, document, step.line, message)


def compared_commits(context: Context) -> Iterator[Finding]:
    """Require that a job under a label verifies its commit before running anything from it."""
    rule = "commit-compared"
    for document in context.workflows:
        if not context.calls.is_reached_by_label(document):
            continue
        for job in document.jobs.values():
            for number, step in enumerate(job.steps):
                after = job.steps[number + 1] if number + 1 < len(job.steps) else None
                if number and step.is_checkout:
                    message = "something runs before the checkout"
                    yield make_finding(rule, document, step.line, message)
                if step.is_checkout and not _is_comparison(after, step, job.env):
                    message = (
                        f"the next step must be `{_COMPARISON}`, with the checkout's ref as SHA"
                    )
                    yield make_finding(rule, document, step.line, message)


def no_branch_names(context: Context) -> Iterator[Finding]:
    """Forbid branch names of pull requests in expressions: their authors choose and move them."""
    names = (
        "github.head_ref", "github.event.pull_request.head.ref",
        "github.event.pull_request.head.label", "github.event.workflow_run.head_branch",
    )  # fmt: skip
    for document in context.documents:
        for scalar, expression in expressions_of(document):
            for name in names:
                if mentions(expression, name):
                    message = f"{name} is a name that the author chooses; write {_HEAD}"
                    yield make_finding("branch-name", document, scalar.line, message)


def no_kept_credentials(context: Context) -> Iterator[Finding]:
    """Require that a checkout leaves no token behind."""
    for document in context.documents:
        for step in document.steps:
            if step.is_checkout and step.inputs.get("persist-credentials") is not False:
                message = "the token stays on the machine; write `persist-credentials: false`"
                yield make_finding("credentials", document, step.line, message)


def _read_exactness(ref: object) -> bool | None:
    """Look a ref up in _EXACT. Returns: None if it is not there."""
    if not isinstance(ref, str) or not (ref.startswith("${{") and ref.endswith("}}")):
        return None
    expressions = list(expressions_in(ref))
    return _EXACT.get(expressions[0]) if len(expressions) == 1 else None


def _is_comparison(step: Step | None, checkout: Step, env: dict[str, object]) -> bool:
    if step is None or step.run.strip() != _COMPARISON or "if" in step.raw:
        return False
    sha, ref = step.env.get("SHA", env.get("SHA")), checkout.inputs.get("ref")
    return list(expressions_in(str(sha))) == list(expressions_in(str(ref)))
