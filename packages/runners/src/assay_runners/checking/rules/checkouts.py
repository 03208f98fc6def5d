"""The commit that a job runs."""

from collections.abc import Iterator

from assay_runners.checking.context import Context, Problem, expressions_of
from assay_runners.checking.workflow_files.documents import Document, Step
from assay_runners.checking.workflow_files.scalars import expressions_in, mentions

_HEAD = "github.event.pull_request.head.sha"
# The expressions, normalized, that name an exact commit, and whether they still do under a label.
# `inputs.sha` is as exact as the callers' value, and the callers have to keep the same rule.
_EXACT = {"github.sha": False, "inputs.sha": True, _HEAD: True, f"{_HEAD}||github.sha": True}
_COMPARISON = 'test "$(git rev-parse HEAD)" = "$SHA"'


def exact_commits(document: Document, context: Context) -> Iterator[Problem]:
    """Require an exact commit in a checkout; under a label, the head that received the label."""
    labeled = context.calls.is_reached_by_label(document)
    for job in document.jobs.values():
        given = job.inputs.get("sha")
        refs = [] if given is None else [(given, job.line_of("with"))]
        refs += [(one.inputs.get("ref"), one.line) for one in job.steps if one.is_checkout]
        for ref, line in refs:
            exact = _read_exactness(ref)
            if exact is None:
                yield line, f"{ref!r} is not an exact commit; write one of {', '.join(_EXACT)}"
            elif labeled and not exact:
                message = f"a label starts this, and {ref!r} is not its commit; write {_HEAD}"
                yield line, message
    for step in document.steps:
        if step.is_checkout and step.inputs.get("repository") is not None:
            yield step.line, "it checks out another repository"


def compared_commits(document: Document, context: Context) -> Iterator[Problem]:
    """Require that a job under a label verifies its commit before running anything from it."""
    if not context.calls.is_reached_by_label(document):
        return
    for job in document.jobs.values():
        for number, step in enumerate(job.steps):
            after = job.steps[number + 1] if number + 1 < len(job.steps) else None
            if number and step.is_checkout:
                yield step.line, "something runs before the checkout"
            if step.is_checkout and not _is_comparison(after, step, job.env):
                message = f"the next step must be `{_COMPARISON}`, with the checkout's ref as SHA"
                yield step.line, message


def no_branch_names(document: Document, _: Context) -> Iterator[Problem]:
    """Forbid branch names of pull requests in expressions: their authors choose and move them."""
    names = (
        "github.head_ref", "github.event.pull_request.head.ref",
        "github.event.pull_request.head.label", "github.event.workflow_run.head_branch",
    )  # fmt: skip
    for scalar, expression in expressions_of(document):
        for name in names:
            if mentions(expression, name):
                yield scalar.line, f"{name} is a name that the author chooses; write {_HEAD}"


def no_kept_credentials(document: Document, _: Context) -> Iterator[Problem]:
    """Require that a checkout leaves no token behind."""
    for step in document.steps:
        if step.is_checkout and step.inputs.get("persist-credentials") is not False:
            yield step.line, "the token stays on the machine; write `persist-credentials: false`"


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
