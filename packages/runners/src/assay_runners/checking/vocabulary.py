"""The rules that workflows and actions contain what `vocabulary.toml` requires, and only what it lists."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ruamel.yaml.comments import CommentedMap

from assay.errors import UsageError
from assay.files import read_toml
from assay_runners.checking.workflow_documents import (
    Context,
    Document,
    Problem,
    Scalar,
    expressions_in,
    find_scalars,
    normalize,
)

_FILE = "packages/runners/src/assay_runners/checking/vocabulary.toml"
_MAX_MINUTES = 360
_CALLERS_MINUTES = ("${{ inputs.minutes }}", "${{ matrix.timeout_minutes }}")

_Allowed = str | list[Any]


def known_words(document: Document, context: Context) -> Iterator[Problem]:
    """Report every key and value that the vocabulary does not list."""
    vocabulary = _read_vocabulary()
    common = vocabulary["workflow" if document in context.workflows else "action"]
    words = _Words([vocabulary.get(document.name, {}), common], context)
    for scalar in find_scalars(document.raw):
        problem = words.find_problem(scalar)
        if problem:
            advice = f"If you need it, add to {_FILE}: {_line_for(scalar)}"
            yield scalar.line, f"{scalar.numbered}: {problem}. {advice}"


def required_keys(document: Document, _: Context) -> Iterator[Problem]:
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
            "check_action": github.check_action,
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
