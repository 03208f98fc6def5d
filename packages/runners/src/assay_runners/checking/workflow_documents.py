"""Workflow files: their values with line numbers, their expressions in one normal form, and their calls."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import YAMLError

from assay.errors import UsageError
from assay.files import read_text
from assay_runners.fleet import Fleet

WORKFLOWS, ACTIONS, OWNERS = ".github/workflows", ".github/actions", ".github/CODEOWNERS"


@dataclass(frozen=True)
class _Caller:
    """A step or a job: it uses an action or a workflow, or runs commands."""

    raw: CommentedMap
    line: int

    @property
    def uses(self) -> str:
        """The action or workflow with its commit; "" if there is none."""
        return str(self.raw.get("uses") or "")

    @property
    def inputs(self) -> CommentedMap:
        """The values of `with`."""
        return _mapping(self.raw.get("with"))

    @property
    def env(self) -> CommentedMap:
        """Its variables."""
        return _mapping(self.raw.get("env"))

    def line_of(self, key: str) -> int:
        """Find the line of a key; the first line if there is no such key."""
        return _line_of(self.raw, key, self.line)


@dataclass(frozen=True)
class Step(_Caller):
    """A step of a job or of a composite action."""

    @property
    def run(self) -> str:
        """The command; "" for a step that uses an action."""
        return str(self.raw.get("run") or "")

    @property
    def is_checkout(self) -> bool:
        """The step checks a commit out."""
        return self.uses.lower().startswith("actions/checkout@")


@dataclass(frozen=True)
class Job(_Caller):
    """A job of a workflow."""

    id: str

    @cached_property
    def steps(self) -> list[Step]:
        """Its steps; empty if it calls a workflow."""
        return _steps(self.raw.get("steps"), self.line)

    @property
    def needs(self) -> list[str]:
        """The jobs that it waits for."""
        return _strings(self.raw.get("needs"))

    @property
    def environment(self) -> str:
        """The environment whose reviewers it waits for; "" if there is none."""
        environment = self.raw.get("environment") or ""
        return str(environment.get("name", "") if isinstance(environment, dict) else environment)


@dataclass(frozen=True)
class Document:
    """A workflow, a composite action or CODEOWNERS."""

    file: str
    """Relative to the root."""
    text: str
    raw: CommentedMap
    special_syntax: tuple[tuple[int, str], ...] = ()
    """The line and kind of each YAML feature behind which GitHub sees more than a reader does."""

    @property
    def kind(self) -> str:
        """The table of the vocabulary for all such files."""
        return {WORKFLOWS: "workflow", ACTIONS: "action"}.get(
            "/".join(self.file.split("/")[:2]), ""
        )

    @property
    def name(self) -> str:
        """The file name: "ci.yml"."""
        return self.file.rsplit("/", 1)[-1]

    @cached_property
    def jobs(self) -> dict[str, Job]:
        """The jobs of a workflow; empty for an action."""
        jobs = _mapping(self.raw.get("jobs"))
        return {
            str(name): Job(_mapping(job), _line_of(jobs, name, 1), str(name))
            for name, job in jobs.items()
        }

    @cached_property
    def steps(self) -> list[Step]:
        """The steps of all jobs, or of the action."""
        action = _steps(_mapping(self.raw.get("runs")).get("steps"), 1)
        return action + [step for job in self.jobs.values() for step in job.steps]

    @cached_property
    def events(self) -> dict[str, CommentedMap]:
        """The events that start a workflow, with their filters."""
        on = self.raw.get("on")
        if isinstance(on, str):
            return {on: CommentedMap()}
        if isinstance(on, CommentedSeq):
            return {str(name): CommentedMap() for name in on}
        return {str(name): _mapping(filters) for name, filters in _mapping(on).items()}

    def types(self, event: str) -> set[str]:
        """Read the activity types of `event` that start it."""
        filters = self.events.get(event)
        if filters is None:
            return set()
        types = filters.get("types")
        if types is None:
            return {"opened", "synchronize", "reopened"} if event.startswith("pull_") else {""}
        return set(_strings(types))

    def line_of(self, key: str) -> int:
        """Find the line of a top-level key."""
        return _line_of(self.raw, key, 1)


def read_documents(root: Path) -> list[Document]:
    """Read the workflows, the composite actions and CODEOWNERS below `root`.

    Raises: UsageError if there is no workflow, or a file is not a YAML mapping.
    """
    workflows = _files(root / WORKFLOWS, "*")
    if not workflows:
        raise UsageError(
            f"{root / WORKFLOWS} has no workflow; name a checkout of assay with --root"
        )
    read = [_read(file, root) for file in workflows + _files(root / ACTIONS, "**/action")]
    return [*read, *map(_read_owners, filter(Path.is_file, [root / OWNERS]))]


def _read_owners(file: Path) -> Document:
    """Read CODEOWNERS as a mapping from a pattern to its owners."""
    text = read_text(file)
    raw = CommentedMap()
    for number, line in enumerate(text.splitlines()):
        pattern, *owners = line.partition("#")[0].split() or [""]
        if pattern:
            raw[pattern] = " ".join(owners)
            raw.lc.add_kv_line_col(pattern, [number, 0, number, 0])
    return Document(OWNERS, text, raw)


def _read(file: Path, root: Path) -> Document:
    text = read_text(file)
    try:
        special_syntax, raw = _parse(text)
    except (YAMLError, RecursionError) as error:
        raise UsageError(f"{file} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, CommentedMap):
        raise UsageError(f"{file} is not a workflow: it is not a mapping")
    return Document(file.relative_to(root).as_posix(), text, raw, special_syntax)


@cache
def _parse(text: str) -> tuple[tuple[tuple[int, str], ...], object]:
    """Return the special syntax and the values, which nobody changes: one edit is one file to parse."""
    special_syntax = tuple(_find_special_syntax(text))
    # Nested aliases take exponential time to expand, and no alias is allowed.
    return special_syntax, CommentedMap() if special_syntax else YAML(typ="rt").load(text)


_SPECIAL_SYNTAX = {
    "AnchorToken": "an anchor", "AliasToken": "an alias", "TagToken": "a tag",
    "DirectiveToken": "a directive", "DocumentStartToken": "a document start",
}  # fmt: skip


def _find_special_syntax(text: str) -> Iterator[tuple[int, str]]:
    for token in YAML(typ="rt").scan(text):
        if kind := _SPECIAL_SYNTAX.get(type(token).__name__):
            yield token.start_mark.line + 1, kind


def _strings(value: object) -> list[str]:
    """Return the strings of a list, or the string itself."""
    values = value if isinstance(value, list) else [value]
    return [one for one in values if isinstance(one, str)]


def _files(folder: Path, pattern: str) -> list[Path]:
    return sorted(
        file for file in folder.glob(f"{pattern}.*") if file.suffix.lower() in (".yml", ".yaml")
    )


def _steps(raw: object, line: int) -> list[Step]:
    if not isinstance(raw, CommentedSeq):
        return []
    return [
        Step(step, step.lc.line + 1 if step.lc.line is not None else line)
        for step in raw
        if isinstance(step, CommentedMap)
    ]


def _mapping(value: Any) -> CommentedMap:  # noqa: ANN401 - any YAML value
    return value if isinstance(value, CommentedMap) else CommentedMap()


def _line_of(mapping: CommentedMap, key: object, otherwise: int) -> int:
    place = mapping.lc.data.get(key) if mapping.lc.data else None
    return place[0] + 1 if place else otherwise


_LITERAL = r"'(?:[^']|'')*'"
# Braces inside a literal do not end the expression.
_EXPRESSION = re.compile(rf"\$\{{\{{((?:{_LITERAL}|(?!\}}\}}).)*?)\}}\}}", re.DOTALL)
_INDEX = re.compile(r"\[\s*'([^']*)'\s*\]")


@dataclass(frozen=True)
class Scalar:
    """A value without parts. An empty mapping or list counts as one."""

    place: str
    """The path: "jobs.smoke.steps[].run"."""
    numbered: str
    """The path with the numbers of list entries, from 1: "jobs.smoke.steps[2].run"."""
    value: object
    line: int

    @property
    def key(self) -> str:
        """The last key of the path."""
        return self.place.rsplit(".", 1)[-1].removesuffix("[]")


def find_scalars(
    node: object, place: str = "", numbered: str = "", line: int = 1
) -> Iterator[Scalar]:
    """Yield all scalars below `node`."""
    if isinstance(node, CommentedMap) and node:
        for key, value in node.items():
            at = node.lc.data[key][0] + 1 if key in (node.lc.data or {}) else line
            dot = "." if place else ""
            yield from find_scalars(value, f"{place}{dot}{key}", f"{numbered}{dot}{key}", at)
    elif isinstance(node, CommentedSeq) and node:
        for number, value in enumerate(node):
            at = node.lc.data[number][0] + 1 if number in (node.lc.data or {}) else line
            yield from find_scalars(value, f"{place}[]", f"{numbered}[{number + 1}]", at)
    else:
        yield Scalar(place, numbered, node, line)


def expressions_in(text: str, *, is_condition: bool = False) -> Iterator[str]:
    """Yield the expressions of `text`, normalized. A condition without braces is one expression."""
    found = [match[1] for match in _EXPRESSION.finditer(text)]
    if is_condition and not found:
        found = [text]
    yield from map(normalize, found)


def normalize(expression: str) -> str:
    """Convert to lower case, drop spaces outside literals, and write `a['b']` as `a.b`."""
    parts = re.split(f"({_LITERAL})", _INDEX.sub(r".\1", expression))
    return "".join(
        part if part.startswith("'") else re.sub(r"\s+", "", part) for part in parts
    ).lower()


def mentions(expression: str, path: str) -> bool:
    """Check that a normalized expression reads `path` or an object that contains it.

    `toJSON(github.event)` reads every path that begins with github.event.
    """
    pattern = rf"(?<![\w.]){re.escape(path)}(?![\w])"
    if re.search(pattern, expression):
        return True
    parents = path.split(".")
    wholes = [".".join(parents[:count]) for count in range(1, len(parents))]
    return any(re.search(rf"tojson\({re.escape(whole)}\)", expression) for whole in wholes)


# A line that breaks a rule, from 1, and the problem with what to write instead.
Problem = tuple[int, str]


@dataclass(frozen=True)
class CallGraph:
    """All workflows of a repository and their calls."""

    workflows: tuple[Document, ...]

    @cached_property
    def callers(self) -> dict[str, set[str]]:
        """By file name, the workflow itself and all its direct and indirect callers."""
        direct: dict[str, set[str]] = {workflow.name: set() for workflow in self.workflows}
        for workflow in self.workflows:
            for job in workflow.jobs.values():
                called = called_file(job.uses)
                if called in direct:
                    direct[called].add(workflow.name)
        found = {name: {name, *above} for name, above in direct.items()}
        for _ in self.workflows:
            for above in found.values():
                above.update(*(direct[name] for name in sorted(above)))
        return found

    def find_starters(self, workflow: Document) -> list[Document]:
        """Find the workflows whose events reach it."""
        names = self.callers[workflow.name]
        return [other for other in self.workflows if other.name in names]

    def is_reached_by(self, workflow: Document, event: str) -> bool:
        """Check that `event` starts it or one of its callers."""
        return any(event in other.events for other in self.find_starters(workflow))

    def is_reached_by_label(self, workflow: Document) -> bool:
        """Check that a label given to a pull request reaches it."""
        starters = self.find_starters(workflow)
        labeled = any("labeled" in other.types("pull_request") for other in starters)
        return labeled or self._is_for_other_repositories(workflow)

    def _is_for_other_repositories(self, workflow: Document) -> bool:
        """Check that it can be called and no workflow here calls it. A pull request may call it there."""
        is_only_called = set(workflow.events) == {"workflow_call"}
        return is_only_called and self.find_starters(workflow) == [workflow]


def called_file(uses: str) -> str:
    """Return the file name of the workflow that a job calls; "" if it calls none."""
    path = uses.partition("@")[0]
    return path.rsplit("/", 1)[-1] if "/.github/workflows/" in path else ""


@dataclass(frozen=True)
class Context:
    """A repository as the rules see it."""

    calls: CallGraph
    fleet: Fleet
