"""The rules for the committed workflows that no general linter has, and the function that applies them.

Most are about relations: what a workflow may have depends on its other jobs, its callers and its events.
`vocabulary.toml` lists the keys and values that all of them may have. The table `RULES` is at the end.
"""

import ast
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from ruamel.yaml.comments import CommentedMap

from assay.errors import UsageError
from assay.files import read_toml
from assay_runners.checking.workflow_documents import (
    CallGraph,
    Context,
    Document,
    Job,
    Problem,
    Scalar,
    Step,
    called_file,
    expressions_in,
    find_scalars,
    mentions,
    normalize,
    read_documents,
)
from assay_runners.fleet import RUNNERS_FILE, Fleet
from assay_runners.planning import (
    BEFORE_MACHINES,
    FIRST_TIERS,
    NIGHTLY,
    RELEASE,
    RELEASE_TAGS,
    TIER_SESSIONS,
)

_ACCELERATOR = "accelerator.yml"
_HEAD = "github.event.pull_request.head.sha"
_COMPARISON = 'test "$(git rev-parse HEAD)" = "$SHA"'
_COMMIT = re.compile(r"@[0-9a-f]{40}$")
_VERSION = re.compile(r"# v\d+\.\d+\.\d+\s*$")


def pushes(document: Document, _: Document, context: Context) -> Iterator[Problem]:
    """Require that only a push to the protected branch, or the tag of a release, starts a workflow."""
    branches = {"branches": [context.fleet.github.protected_ref]}
    allowed = {"tags": [RELEASE_TAGS]} if document.name == RELEASE else branches
    push = document.events.get("push")
    if push is not None and push != allowed:
        ((key, names),) = allowed.items()
        yield document.line_of("on"), f"other pushes start this; write {key}: [{', '.join(names)}]"


def schedules(document: Document, _: Document, context: Context) -> Iterator[Problem]:
    """Require the schedules of runners/github.toml, by which the planner recognizes the workflow."""
    github = context.fleet.github
    known = {"nightly.yml": github.nightly, "reaper.yml": github.reaper}
    if "schedule" in document.events and document.crons != [known.get(document.name)]:
        has = known.get(document.name)
        message = f"its crons are {document.crons}; runners/github.toml has {has!r}"
        yield document.line_of("on"), message


def called_alone(document: Document, *_: object) -> Iterator[Problem]:
    """Require that only other workflows start a called one: a person could enter any commit."""
    others = document.events.keys() - {"workflow_call"}
    if "workflow_call" in document.events and others:
        message = f"{', '.join(sorted(others))} would start it without the commit of a caller"
        yield document.line_of("on"), message


def labels_without_new_commits(
    document: Document, _: Document, context: Context
) -> Iterator[Problem]:
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


def no_foreign_code_with_write_access(job: Job, *_: object) -> Iterator[Problem]:
    """Forbid actions and calls in workflows of pull_request_target. The vocabulary lists commands."""
    for user in (job, *job.steps):
        if user.uses:
            yield user.line, f"{user.uses} could run code of the author with a token that may write"


def _find_label_readers(document: Document, context: Context) -> Iterator[str]:
    """Find the files with a condition on a label, among a workflow and all that it calls."""
    for other in context.workflows:
        if document.name not in context.calls.callers[other.name]:
            continue
        conditions = [
            " ".join(expressions_in(str(scalar.value), is_condition=True))
            for scalar in find_scalars(other.raw)
            if scalar.key == "if"
        ]
        read = ("github.event.label", "github.event.pull_request.labels")
        if any(mentions(condition, path) for condition in conditions for path in read):
            yield other.name


def labeled_commits(job: Job, *_: object) -> Iterator[Problem]:
    """Require under a label the commit that received it: `github.sha` is a later merge with main."""
    refs = [(job.inputs.get("sha"), job.line_of("with"))]
    refs += [(step.inputs.get("ref"), step.line) for step in job.steps if step.is_checkout]
    for ref, line in refs:
        if list(expressions_in(str(ref))) == ["github.sha"]:
            yield line, f"a label starts this, and {ref!r} is not its commit; write {_HEAD}"


def compared_commits(job: Job, *_: object) -> Iterator[Problem]:
    """Require that a job under a label verifies its commit before running anything from it."""
    for number, step in enumerate(job.steps):
        after = job.steps[number + 1] if number + 1 < len(job.steps) else None
        if number and step.is_checkout:
            yield step.line, "something runs before the checkout"
        if step.is_checkout and not _is_comparison(after, step, job.env):
            message = f"the next step must be `{_COMPARISON}`, with the checkout's ref as SHA"
            yield step.line, message


def _is_comparison(step: Step | None, checkout: Step, env: dict[str, object]) -> bool:
    if step is None or step.run.strip() != _COMPARISON or "if" in step.raw:
        return False
    sha, ref = step.env.get("SHA", env.get("SHA")), checkout.inputs.get("ref")
    return list(expressions_in(str(sha))) == list(expressions_in(str(ref)))


def named_versions(step: Step, document: Document, _: Context) -> Iterator[Problem]:
    """Require the version of each foreign action, which updates of its commit read."""
    line = step.line_of("uses")
    if _COMMIT.search(step.uses) and not _VERSION.search(document.text.split("\n")[line - 1]):
        yield line, f"{step.uses} has no version; write it after the commit: # v1.2.3"


def guarded_machines(job: Job, document: Document, context: Context) -> Iterator[Problem]:
    """Require calls of accelerator.yml at the protected branch, from workflows that an event starts."""
    if called_file(job.uses) != _ACCELERATOR:
        return
    github = context.fleet.github
    protected = f"{github.repository}/.github/workflows/{_ACCELERATOR}@{github.protected_ref}"
    if job.uses != protected:
        message = f"{job.uses} is not {protected}: a pull request could edit it"
        yield job.line_of("uses"), message
    if "workflow_call" in document.events:
        message = f"other workflows can call {document.name}: its callers decide who approves"
        yield job.line_of("uses"), message
    environment = document.name.rsplit(".", 1)[0]
    approving = (document.jobs[name].environment for name in _find_predecessors(document, job))
    if "workflow_dispatch" in document.events and environment not in approving:
        message = f"{job.id} waits for no job with the environment {environment} and its reviewers"
        yield job.line, message


def known_needs(job: Job, document: Document, _: Context) -> Iterator[Problem]:
    """Require that a job waits for existing jobs: otherwise GitHub rejects the whole file."""
    for name in job.needs:
        if name not in document.jobs:
            near = get_close_matches(name, document.jobs, n=1)
            nearest = f"; nearest is {near[0]}" if near else ""
            message = f"{job.id} needs the job {name!r}, which does not exist{nearest}"
            yield job.line_of("needs"), message


def tests_first(job: Job, document: Document, _: Context) -> Iterator[Problem]:
    """Require that all jobs that do not precede the job `tests` wait for it."""
    tests = document.jobs.get("tests")
    if tests is None or job is tests or job.id in _find_predecessors(document, tests):
        return
    if "tests" not in _find_predecessors(document, job):
        yield job.line_of("needs"), f"{job.id} does not wait for the job `tests`"


def groups_of_labels(job: Job, *_: object) -> Iterator[Problem]:
    """Require that no label cancels a job of another label, commit or pull request."""
    group = job.raw.get("concurrency")
    name = str(group.get("group", "") if isinstance(group, dict) else group or "")
    expression = " ".join(expressions_in(name))
    for part, pattern in _PARTS_OF_GROUPS.items():
        if name and not re.search(pattern, expression):
            message = f"{job.id} shares its group with others: add the {part}"
            yield job.line_of("concurrency"), message


_PARTS_OF_GROUPS = {
    "number of the pull request": r"pull_request\.number",
    "commit": "sha",
    "label or target": r"matrix\.target|inputs\.(target|machine)|label\.name",
}


def _find_predecessors(document: Document, job: Job) -> set[str]:
    """Find the jobs that `job` waits for, directly or indirectly."""
    before: set[str] = set()
    waiting = list(job.needs)
    while waiting:
        name = waiting.pop()
        if name in document.jobs and name not in before:
            before.add(name)
            waiting += document.jobs[name].needs
    return before


_FILE = "packages/runners/src/assay_runners/checking/vocabulary.toml"
_MAX_MINUTES = 360
_CALLERS_MINUTES = ("${{ inputs.minutes }}", "${{ matrix.timeout_minutes }}")

_Allowed = str | list[Any]


def known_words(document: Document, _: Document, context: Context) -> Iterator[Problem]:
    """Report every key and value that the vocabulary does not list."""
    vocabulary = _read_vocabulary()
    common = vocabulary["workflow" if document in context.workflows else "action"]
    words = _Words([vocabulary.get(document.name, {}), common], context)
    for scalar in find_scalars(document.raw):
        problem = words.find_problem(scalar)
        if problem:
            advice = f"If you need it, add to {_FILE}: {_line_for(scalar)}"
            yield scalar.line, f"{scalar.numbered}: {problem}. {advice}"


def required_keys(document: Document, *_: object) -> Iterator[Problem]:
    """Require the keys without which a default of GitHub holds, such as a limit of six hours."""
    required = _read_vocabulary()["required"]

    def find_missing(node: CommentedMap, keys: list[str], line: int) -> Iterator[Problem]:
        yield from ((line, f"{key} is missing") for key in keys if key not in node)

    yield from find_missing(document.raw, required["workflow"], 1)
    for job in document.jobs.values():
        keys = required["call" if job.uses else "job"]
        keys = keys + required.get(f"{document.name} {job.id}", [])
        yield from find_missing(job.raw, keys, job.line)
        for step in filter(lambda step: step.is_checkout, job.steps):
            yield from find_missing(step.inputs, required["checkout"], step.line)


@cache
def _read_vocabulary() -> dict[str, Any]:
    """Read the file. Raises: UsageError if it is not TOML, or names an unknown kind of value."""
    read = read_toml(Path(__file__).with_name("vocabulary.toml"))
    tables = [read[name] for name in read if name not in ("expressions", "required")]
    for place, allowed in (entry for table in tables for entry in table.items()):
        if not isinstance(allowed, list) and allowed not in _KINDS:
            kinds = ", ".join(map(repr, _KINDS))
            raise UsageError(
                f"{_FILE}: {place}: {allowed!r} is neither a list [...] nor one of {kinds}"
            )
    return read


class _Words:
    """The allowed values of a file, by place."""

    def __init__(self, tables: Iterable[Mapping[str, _Allowed]], context: Context) -> None:
        """Take the tables of the file itself and of its kind. The first with a place decides."""
        self._tables = [
            [
                (re.compile(re.escape(place).replace(r"\*", r"[^.\[\]]+")), allowed)
                for place, allowed in table.items()
            ]
            for table in tables
        ]
        github = context.fleet.github
        self._names = {
            **github.model_dump(),
            "own": github.own,
            "job_action": github.job_action,
        }
        self._sessions = "|".join(map(re.escape, sorted(context.sessions)))

    def find_problem(self, scalar: Scalar) -> str:
        """Say why the value is not allowed; "" if it is."""
        listed = ([one for key, one in t if key.fullmatch(scalar.place)] for t in self._tables)
        allowed = next(filter(None, listed), [])
        if not allowed:
            return "no workflow of ours has this key"
        if any(self._is_allowed(scalar.value, one) for one in allowed):
            return ""
        if any(self._is_allowed(_toggle_quotes(scalar.value), one) for one in allowed):
            quotes = "without" if isinstance(scalar.value, str) else "with"
            return f"write {scalar.value} {quotes} quotes"
        return f"{_normalize_space(scalar.value)!r} is a new value"

    def _is_allowed(self, value: object, allowed: _Allowed) -> bool:
        if isinstance(allowed, str):
            return _KINDS[allowed](value)
        return any(self._is_entry(value, entry) for entry in allowed)

    def _is_entry(self, value: object, entry: object) -> bool:
        if not isinstance(value, str) or not isinstance(entry, str):
            return isinstance(value, bool) == isinstance(entry, bool) and value == entry
        filled = re.sub(r"<(\w+)>", lambda name: self._names.get(name[1], name[0]), entry)
        pattern = re.escape(str(_normalize_space(filled)))
        pattern = pattern.replace(re.escape("<sha>"), "[0-9a-f]{40}")
        pattern = pattern.replace(re.escape("<session>"), f"(?:{self._sessions})")
        return re.fullmatch(pattern, str(_normalize_space(value))) is not None


def _normalize_space(value: object) -> object:
    return " ".join(value.split()) if isinstance(value, str) else value


def _line_for(scalar: Scalar) -> str:
    """Write the line of the vocabulary that would allow the value."""
    place = re.sub(r"^jobs\.[^.]+", "jobs.*", scalar.place)
    return f"{json.dumps(place)} = {json.dumps([_normalize_space(scalar.value)], default=str)}"


def _toggle_quotes(value: object) -> object:
    """Convert between the value with quotes and the value without."""
    if not isinstance(value, str):
        return str(value)
    return int(value) if value.isdigit() else {"true": True, "false": False}.get(value, value)


def _is_minutes(value: object) -> bool:
    if isinstance(value, str):
        return value in _CALLERS_MINUTES
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MAX_MINUTES


def _has_known_expressions(value: object) -> bool:
    known = set(map(normalize, _read_vocabulary()["expressions"]))
    return isinstance(value, str) and set(expressions_in(value)) <= known


_KINDS: dict[str, Callable[[object], bool]] = {
    "text": lambda value: isinstance(value, str) and "${{" not in value,
    "words": _has_known_expressions,
    "minutes": _is_minutes,
    "nothing": lambda value: value is None or value == {},
}


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


@dataclass(frozen=True)
class Rule:
    """A rule: what it looks for, in which parts of a file, and in which files."""

    find: Callable[..., Iterator[Problem]]
    """Called with a part, its document and the context."""
    parts: Callable[[Document], Iterable[Document | Job | Step]] = lambda document: (document,)
    applies: Callable[[CallGraph, Document], bool] = lambda *_: True
    also_to_actions: bool = False

    def problems(self, document: Document, context: Context) -> Iterator[Problem]:
        """Find the problems of one file."""
        if self.applies(context.calls, document):
            for part in self.parts(document):
                yield from self.find(part, document, context)


def _jobs(document: Document) -> Iterable[Job]:
    return document.jobs.values()


RULES = {
    "required": Rule(required_keys),
    "checkout": Rule(labeled_commits, _jobs, CallGraph.is_reached_by_label),
    "commit-compared": Rule(compared_commits, _jobs, CallGraph.is_reached_by_label),
    "push": Rule(pushes),
    "schedule": Rule(schedules),
    "called-alone": Rule(called_alone),
    "label-and-push": Rule(labels_without_new_commits),
    "pull-request-target": Rule(
        no_foreign_code_with_write_access,
        _jobs,
        lambda calls, document: calls.is_reached_by(document, "pull_request_target"),
    ),
    "machine-guard": Rule(guarded_machines, _jobs),
    "needs": Rule(known_needs, _jobs),
    "tests-first": Rule(tests_first, _jobs),
    "concurrency": Rule(groups_of_labels, _jobs, CallGraph.is_reached_by_label),
    "version": Rule(named_versions, lambda document: document.steps, also_to_actions=True),
    "vocabulary": Rule(known_words, also_to_actions=True),
}


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
        for name, rule in RULES.items()
        if rule.also_to_actions or document in workflows
        for line, message in rule.problems(document, context)
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
