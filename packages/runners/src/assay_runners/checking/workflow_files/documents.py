"""The committed workflows and actions, with the line of everything in them."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import YAMLError

from assay.errors import UsageError
from assay.files import read_text

WORKFLOWS, ACTIONS = ".github/workflows", ".github/actions"


@dataclass(frozen=True)
class _Caller:
    """What uses an action or a workflow, or runs commands itself."""

    raw: CommentedMap
    line: int

    @property
    def uses(self) -> str:
        """The action or workflow, with its commit; "" where it uses none."""
        return str(self.raw.get("uses") or "")

    @property
    def given(self) -> CommentedMap:
        """What that is given."""
        return _mapping(self.raw.get("with"))

    @property
    def env(self) -> CommentedMap:
        """The variables that it sets."""
        return _mapping(self.raw.get("env"))

    def line_of(self, key: str) -> int:
        """The line of one of its keys; its first line if it has no such key."""
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
        """Whether it brings a commit onto the machine."""
        return self.uses.lower().startswith("actions/checkout@")


@dataclass(frozen=True)
class Job(_Caller):
    """A job of a workflow."""

    id: str

    @cached_property
    def steps(self) -> list[Step]:
        """Its steps; none where it calls a workflow."""
        return _steps(self.raw.get("steps"), self.line)

    @property
    def needs(self) -> list[str]:
        """The jobs that come before it."""
        return _strings(self.raw.get("needs"))

    @property
    def environment(self) -> str:
        """The environment whose reviewers it waits for; "" where there is none."""
        environment = self.raw.get("environment") or ""
        return str(environment.get("name", "") if isinstance(environment, dict) else environment)


@dataclass(frozen=True)
class Document:
    """A workflow or a composite action.

    file: relative to the root.
    unplain: line and kind of what plain YAML does without; of it a reader sees less than GitHub does.
    """

    file: str
    text: str
    raw: CommentedMap
    unplain: tuple[tuple[int, str], ...] = ()

    @property
    def name(self) -> str:
        """The name of the file: "ci.yml"."""
        return self.file.rsplit("/", 1)[-1]

    @cached_property
    def lines(self) -> list[str]:
        """Its lines as they are written, comments included."""
        return self.text.split("\n")

    @cached_property
    def jobs(self) -> dict[str, Job]:
        """The jobs of a workflow; none for an action."""
        jobs = _mapping(self.raw.get("jobs"))
        return {
            str(name): Job(_mapping(job), _line_of(jobs, name, 1), str(name))
            for name, job in jobs.items()
        }

    @cached_property
    def steps(self) -> list[Step]:
        """All steps: of its jobs, or of an action."""
        action = _steps(_mapping(self.raw.get("runs")).get("steps"), 1)
        return action + [step for job in self.jobs.values() for step in job.steps]

    @cached_property
    def events(self) -> dict[str, CommentedMap]:
        """The events that start a workflow, each with its filters."""
        on = self.raw.get("on")
        if isinstance(on, str):
            return {on: CommentedMap()}
        if isinstance(on, CommentedSeq):
            return {str(name): CommentedMap() for name in on}
        found = {}
        for name, filters in _mapping(on).items():
            found[str(name)] = (
                CommentedMap(crons=_list(filters)) if name == "schedule" else _mapping(filters)
            )
        return found

    def types(self, event: str) -> set[str]:
        """The activities of `event` that start it."""
        filters = self.events.get(event)
        if filters is None:
            return set()
        types = filters.get("types")
        if types is None:
            return {"opened", "synchronize", "reopened"} if event.startswith("pull_") else {""}
        return set(_strings(types))

    def line_of(self, key: str) -> int:
        """The line of a key at its top."""
        return _line_of(self.raw, key, 1)


def read_documents(root: Path) -> tuple[list[Document], list[Document]]:
    """The workflows and the composite actions below `root`.

    Raises: UsageError if there is no workflow, or a file is no YAML mapping.
    """
    workflows = [_read(file, root) for file in _files(root / WORKFLOWS, "*")]
    if not workflows:
        raise UsageError(
            f"{root / WORKFLOWS} has no workflow; name a checkout of assay with --root"
        )
    return workflows, [_read(file, root) for file in _files(root / ACTIONS, "**/action")]


def _read(file: Path, root: Path) -> Document:
    text = read_text(file)
    try:
        unplain = tuple(_find_unplain(text))
        # An alias of an alias of an alias takes for ever to follow, and none is allowed.
        raw = CommentedMap() if unplain else YAML(typ="rt").load(text)
    except (YAMLError, RecursionError) as error:
        raise UsageError(f"{file} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, CommentedMap):
        raise UsageError(f"{file} is no workflow: it holds no mapping")
    return Document(file.relative_to(root).as_posix(), text, raw, unplain)


_UNPLAIN = {
    "AnchorToken": "an anchor", "AliasToken": "an alias", "TagToken": "a tag",
    "DirectiveToken": "a directive", "DocumentStartToken": "a document of its own",
}  # fmt: skip


def _find_unplain(text: str) -> Iterator[tuple[int, str]]:
    for token in YAML(typ="rt").scan(text):
        if kind := _UNPLAIN.get(type(token).__name__):
            yield token.start_mark.line + 1, kind


def _list(value: object) -> list[CommentedMap]:
    """Its mappings, if it is a list."""
    return (
        [one for one in value if isinstance(one, CommentedMap)] if isinstance(value, list) else []
    )


def _strings(value: object) -> list[str]:
    """Its strings, if it is a list, or itself."""
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


def _mapping(value: Any) -> CommentedMap:  # noqa: ANN401 - whatever the YAML has there
    return value if isinstance(value, CommentedMap) else CommentedMap()


def _line_of(mapping: CommentedMap, key: object, otherwise: int) -> int:
    place = mapping.lc.data.get(key) if mapping.lc.data else None
    return place[0] + 1 if place else otherwise
