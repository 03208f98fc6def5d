"""The rules for the committed workflows that no general linter has, and the function that applies them.

`vocabulary.toml` lists the keys and values that files may have, and those that they must have. The other rules are about
relations: what a workflow may have depends on its other jobs, its callers and its events. The table `RULES` is at the end.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from os.path import commonprefix
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
from assay_runners.fleet import Fleet, GitHub

_ACCELERATOR = "accelerator.yml"
_HEAD = "github.event.pull_request.head.sha"
_COMPARISON = 'test "$(git rev-parse HEAD)" = "$SHA"'
_COMMIT = re.compile(r"@[0-9a-f]{40}$")
_VERSION = re.compile(r"# v\d+\.\d+\.\d+\s*$")


def called_alone(document: Document, *_: object) -> Iterator[Problem]:
    """Require that only other workflows start a called one: an event would leave its inputs empty."""
    others = document.events.keys() - {"workflow_call"}
    if "workflow_call" in document.events and others:
        message = f"{', '.join(sorted(others))} would start it without the inputs of a caller"
        yield document.line_of("on"), message


def labels_without_new_commits(
    document: Document, _: Document, context: Context
) -> Iterator[Problem]:
    """Require that only a new label starts a workflow that reads labels: a label is for one commit."""
    types = document.types("pull_request")
    others = ", ".join(sorted(types - {"labeled"}))
    readers = [document.name] if "labeled" in types else _find_label_readers(document, context)
    for reader in readers if others else ():
        message = f"{others}: no label is given then, and {reader} depends on labels"
        yield document.line_of("on"), message


def no_foreign_code_with_write_access(job: Job, *_: object) -> Iterator[Problem]:
    """Forbid actions and calls in workflows of pull_request_target. The vocabulary lists commands."""
    for user in (job, *job.steps):
        if user.uses:
            message = f"pull_request_target starts this: only commands may run, not {user.uses}"
            yield user.line, message


def _find_label_readers(document: Document, context: Context) -> Iterator[str]:
    """Find the files with a condition on a label, among a workflow and all that it calls."""
    for other in context.calls.workflows:
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
            yield line, f"under a label, {ref!r} is a merge of its commit; write {_HEAD}"


def compared_commits(job: Job, *_: object) -> Iterator[Problem]:
    """Require that a job under a label verifies its commit before running anything from it."""
    for number, step in enumerate(job.steps):
        after = job.steps[number + 1] if number + 1 < len(job.steps) else None
        if number and step.is_checkout:
            yield step.line, "a step precedes this checkout: check out first, once"
        if step.is_checkout and not _is_comparison(after, step, job.env):
            yield step.line, f"the next step must be `{_COMPARISON}`, SHA its ref, without `if`"


def _is_comparison(step: Step | None, checkout: Step, env: dict[str, object]) -> bool:
    if step is None or step.run.strip() != _COMPARISON or "if" in step.raw:
        return False
    sha, ref = step.env.get("SHA", env.get("SHA")), checkout.inputs.get("ref")
    return list(expressions_in(str(sha))) == list(expressions_in(str(ref)))


def named_versions(step: Step, document: Document, _: Context) -> Iterator[Problem]:
    """Require the version of each foreign action, which updates of its commit read."""
    line = step.line_of("uses")
    if _COMMIT.search(step.uses) and not _VERSION.search(document.text.split("\n")[line - 1]):
        yield line, f"write the version of {step.uses} after it: # v1.2.3"


def guarded_machines(job: Job, _: Document, context: Context) -> Iterator[Problem]:
    """Require calls of accelerator.yml at the protected branch, the one file whose jobs get machines."""
    github = context.fleet.github
    protected = f"{github.repository}/.github/workflows/{_ACCELERATOR}@{github.protected_ref}"
    if called_file(job.uses) == _ACCELERATOR and job.uses != protected:
        yield job.line_of("uses"), f"{job.uses} is not {protected}, the file for jobs on machines"


def groups_of_labels(job: Job, *_: object) -> Iterator[Problem]:
    """Require that no label cancels a job of another label, commit or pull request."""
    group = job.raw.get("concurrency")
    name = str(group.get("group", "") if isinstance(group, dict) else group or "")
    expression = " ".join(expressions_in(name))
    for part, pattern in _PARTS_OF_GROUPS.items():
        if name and not re.search(pattern, expression):
            message = f"name the {part} in the group of {job.id}, to keep the jobs of labels apart"
            yield job.line_of("concurrency"), message


_PARTS_OF_GROUPS = {
    "number of the pull request": r"pull_request\.number",
    "commit": "sha",
    "label or target": r"matrix\.target|inputs\.(target|machine)|label\.name",
}


_FILE = "packages/runners/src/assay_runners/checking/vocabulary.toml"
_MAX_MINUTES = 360
_CALLERS_MINUTES = ("${{ inputs.minutes }}", "${{ matrix.timeout_minutes }}")

_Allowed = str | list[Any]


def known_values(document: Document, _: Document, context: Context) -> Iterator[Problem]:
    """Report every value that the vocabulary does not list for its place."""
    words = _Words(document, context.fleet.github)
    for scalar in filter(lambda scalar: scalar.place, find_scalars(document.raw)):
        if problem := words.find_problem(scalar):
            yield scalar.line, f"{scalar.numbered}: {problem}"


def missing_values(document: Document, _: Document, context: Context) -> Iterator[Problem]:
    """Report every value of the file's own table that the file lacks."""
    words = _Words(document, context.fleet.github)
    scalars = list(find_scalars(document.raw))
    for key, allowed in _read_vocabulary().get(document.file, {}).items():
        values = [scalar.value for scalar in scalars if _pattern(key).fullmatch(scalar.place)]
        for entry in allowed if isinstance(allowed, list) else [allowed]:
            one = [entry] if isinstance(allowed, list) else entry
            if not any(words.is_allowed(value, one) for value in values):
                message = f"{key} lacks {words.fill(entry)!r}. If it may go, remove it from {_FILE}"
                yield _find_nearest(scalars, key).line, message


def _find_nearest(scalars: Iterable[Scalar], key: str) -> Scalar:
    """Find the value whose place begins most like a key."""
    return max(scalars, key=lambda one: len(commonprefix([one.place, key])))  # noqa: RUF071 - no paths


def required_keys(document: Document, *_: object) -> Iterator[Problem]:
    """Require names, and the keys without which a default of GitHub holds, such as a limit of six hours."""
    required = _read_vocabulary()["required"]

    def find_missing(node: CommentedMap, keys: list[str], line: int) -> Iterator[Problem]:
        yield from ((line, f"{key} is missing") for key in keys if key not in node)

    yield from find_missing(document.raw, required.get(document.kind, ()), 1)
    for job in document.jobs.values():
        yield from find_missing(job.raw, required["call" if job.uses else "job"], job.line)
    for step in document.steps:
        yield from find_missing(step.raw, required["step"], step.line)
        if step.is_checkout:
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


@dataclass(frozen=True)
class _Words:
    """The allowed values of a file, by place."""

    document: Document
    github: GitHub

    @cached_property
    def _tables(self) -> dict[str, Mapping[str, _Allowed]]:
        """The tables of the file itself and of its kind. The first with a place decides."""
        titles = (self.document.file, self.document.kind)
        return {title: _read_vocabulary().get(title, {}) for title in titles}

    @cached_property
    def _names(self) -> dict[str, str]:
        derived = ("organization", "own", "job_action")
        return self.github.model_dump() | {name: getattr(self.github, name) for name in derived}

    def find_problem(self, scalar: Scalar) -> str:
        """Say why the value is not allowed, and what to edit if it should be; "" if it is."""
        value = _normalize_space(scalar.value)
        for title, table in self._tables.items():
            keys = [key for key in table if _pattern(key).fullmatch(scalar.place)]
            if any(self.is_allowed(scalar.value, table[key]) for key in keys):
                return ""
            if any(self.is_allowed(_toggle_quotes(scalar.value), table[key]) for key in keys):
                return f"write {value} {'without' if isinstance(value, str) else 'with'} quotes"
            if keys and isinstance(kind := table[keys[0]], str):
                return f"{value!r} is not {kind!r}, as {_FILE} describes it"
            if keys:
                place = f'{json.dumps(keys[0])} under ["{title}"] in {_FILE}'
                return f"{value!r} is not listed. If you need it, add it to {place}"
        line = f"{json.dumps(scalar.place)} = {json.dumps([value], default=str)}"
        place = f'{_FILE}, under ["{self.document.file}"]'
        return f"the file may not have this key. If you need it, add to {place}: {line}"

    def is_allowed(self, value: object, allowed: _Allowed) -> bool:
        """Check a value against a kind or a list of values."""
        if isinstance(allowed, str):
            return _KINDS[allowed](value)
        return any(self._is_entry(value, entry) for entry in allowed)

    def fill(self, entry: object) -> object:
        """Replace the names of settings by their values."""
        if not isinstance(entry, str):
            return entry
        return _normalize_space(
            re.sub(r"<(\w+)>", lambda name: self._names.get(name[1], name[0]), entry)
        )

    def _is_entry(self, value: object, entry: object) -> bool:
        if not isinstance(value, str) or not isinstance(entry, str):
            return isinstance(value, bool) == isinstance(entry, bool) and value == entry
        pattern = re.escape(str(self.fill(entry)))
        pattern = pattern.replace(re.escape("<sha>"), "[0-9a-f]{40}")
        return re.fullmatch(pattern, str(_normalize_space(value))) is not None


@cache
def _pattern(key: str) -> re.Pattern[str]:
    """Compile a key of the vocabulary."""
    escaped = re.escape(key).replace(r"\*\*", ".+")
    return re.compile(escaped.replace(r"\*", r"[^.\[\]]+"))


def _normalize_space(value: object) -> object:
    return " ".join(value.split()) if isinstance(value, str) else value


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
    "text": lambda value: isinstance(value, str | bool) and "${{" not in str(value),
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

    def find_problems(self, document: Document, context: Context) -> Iterator[Problem]:
        """Find the problems of one file."""
        parts = list(self.parts(document))
        if parts and self.applies(context.calls, document):
            for part in parts:
                yield from self.find(part, document, context)


def _jobs(document: Document) -> Iterable[Job]:
    return document.jobs.values()


RULES = {
    "required": Rule(required_keys),
    "checkout": Rule(labeled_commits, _jobs, CallGraph.is_reached_by_label),
    "commit-compared": Rule(compared_commits, _jobs, CallGraph.is_reached_by_label),
    "called-alone": Rule(called_alone),
    "label-and-push": Rule(labels_without_new_commits),
    "pull-request-target": Rule(
        no_foreign_code_with_write_access,
        _jobs,
        lambda calls, document: calls.is_reached_by(document, "pull_request_target"),
    ),
    "machine-guard": Rule(guarded_machines, _jobs),
    "concurrency": Rule(groups_of_labels, _jobs, CallGraph.is_reached_by_label),
    "version": Rule(named_versions, lambda document: document.steps),
    "vocabulary": Rule(known_values),
    "complete": Rule(missing_values),
}


def check_workflows(root: Path, fleet: Fleet) -> list[Finding]:
    """Check the workflows, the actions and CODEOWNERS below `root`.

    Returns: the findings, sorted.
    Raises: UsageError if there is no workflow, or a file is not YAML.
    """
    documents = read_documents(root)
    special_syntax = [
        Finding(document.file, line, "plain-yaml", f"{kind} is not allowed; write it out")
        for document in documents
        for line, kind in document.special_syntax
    ]
    if special_syntax:
        return sorted(special_syntax)  # the values behind aliases were not read
    context = Context(CallGraph(tuple(one for one in documents if one.kind == "workflow")), fleet)
    found = {
        Finding(document.file, line, name, message)
        for document in documents
        for name, rule in RULES.items()
        for line, message in rule.find_problems(document, context)
    }
    listed = {name for name in _read_vocabulary() if name.startswith(".github/")}
    missing = listed - {document.file for document in documents}
    found |= {Finding(file, 1, "complete", "the file is missing") for file in missing}
    # A changed value is a new value and a missing one, and may break a rule: the first says most.
    for rule in ("vocabulary", "complete"):
        named = {(one.file, one.line) for one in found if one.rule not in (rule, "complete")}
        found = {one for one in found if one.rule != rule or (one.file, one.line) not in named}
    return sorted(found)
