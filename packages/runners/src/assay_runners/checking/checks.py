"""The list of all rules, and the function that applies them."""

import ast
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from assay.errors import UsageError
from assay_runners.checking import relations
from assay_runners.checking.vocabulary import known_words, required_keys
from assay_runners.checking.workflow_documents import (
    CallGraph,
    Context,
    Document,
    Problem,
    read_documents,
)
from assay_runners.fleet.entries import Fleet
from assay_runners.fleet.reading import RUNNERS_FILE
from assay_runners.planning.labels import TIER_SESSIONS
from assay_runners.planning.rules import BEFORE_MACHINES, FIRST_TIERS, NIGHTLY


@dataclass(frozen=True, order=True)
class Finding:
    """A place that breaks a rule."""

    file: str
    """Relative to the root of the repository."""
    line: int
    """The first line is 1."""
    rule: str
    message: str
    """The problem, and what to write instead."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.message}"


_Rule = Callable[[Document, Context], Iterator[Problem]]
_WORKFLOW_RULES: dict[str, _Rule] = {
    "required": required_keys,
    "checkout": relations.labeled_commits,
    "commit-compared": relations.compared_commits,
    "push": relations.pushes,
    "schedule": relations.schedules,
    "called-alone": relations.called_alone,
    "label-and-push": relations.labels_without_new_commits,
    "pull-request-target": relations.no_foreign_code_with_write_access,
    "machine-guard": relations.guarded_machines,
    "needs": relations.known_needs,
    "tests-first": relations.tests_first,
    "concurrency": relations.groups_of_labels,
}
_ALL_FILES_RULES: dict[str, _Rule] = {
    "version": relations.named_versions,
    "vocabulary": known_words,
}
RULES = _WORKFLOW_RULES | _ALL_FILES_RULES


def check_workflows(root: Path, fleet: Fleet, sessions: Collection[str]) -> list[Finding]:
    """Check the workflows and actions below `root`.

    sessions: those of the noxfile.
    Returns: the findings, sorted.
    Raises: UsageError if there is no workflow, or a file is not YAML.
    """
    workflows, actions = map(tuple, read_documents(root))
    special_syntax = [
        Finding(document.file, line, "plain-yaml", f"{kind} is not allowed; write it out")
        for document in (*workflows, *actions)
        for line, kind in document.special_syntax
    ]
    if special_syntax:
        return sorted(special_syntax)  # the values behind aliases were not read
    context = Context(workflows, actions, CallGraph(workflows), fleet, sessions)
    empty = [
        Finding(document.file, 1, "empty", "it has no jobs or no event")
        for document in workflows
        if not document.jobs or not document.events
    ]
    unknown = [
        Finding(place, 1, "session", problem) for place, problem in _find_unknown_sessions(context)
    ]
    found = {
        Finding(document.file, line, name, message)
        for document in context.documents
        for name, rule in (RULES if document in workflows else _ALL_FILES_RULES).items()
        for line, message in rule(document, context)
    }.union(empty, unknown)
    # On a line that another rule names, the vocabulary says nothing new.
    named = {(one.file, one.line) for one in found if one.rule != "vocabulary"}
    return sorted(
        one for one in found if one.rule != "vocabulary" or (one.file, one.line) not in named
    )


def _find_unknown_sessions(context: Context) -> Iterator[tuple[str, str]]:
    """Find the sessions of the planner and of machines that nox does not have, with their places."""
    planned = {*FIRST_TIERS, *NIGHTLY, *BEFORE_MACHINES, "bench", "recapture"}
    planned |= {name for names in TIER_SESSIONS.values() for name in names}
    for name in sorted(planned - set(context.sessions)):
        yield "the planner", f"nox has no session {name!r}"
    for runner in context.fleet.runners():
        for name in runner.kind.sessions:
            if name not in context.sessions:
                place = f"[{runner.vendor.name}] cards = {runner.kind.cards}"
                yield str(RUNNERS_FILE), f"{place}: nox has no session {name!r}"


def read_sessions(root: Path) -> set[str]:
    """Read the names that `nox -s` accepts in this checkout.

    Raises: UsageError if there is no noxfile, or it defines no session.
    """
    file = root / "noxfile.py"
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    found = {
        name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
        if (name := _session_name(decorator, node.name))
    }
    if not found:
        raise UsageError(f"{file} has no session")
    return found


def _session_name(decorator: ast.expr, function: str) -> str:
    """Read the name from `@nox.session` or `@nox.session(name="x")`; "" for other decorators."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    if ast.unparse(called) != "nox.session":
        return ""
    if isinstance(decorator, ast.Call):
        for keyword in decorator.keywords:
            if keyword.arg == "name" and isinstance(keyword.value, ast.Constant):
                return str(keyword.value.value)
    return function
