"""What workflows and actions are written with: `vocabulary.toml`, and nothing else."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from assay.errors import UsageError
from assay.files import read_toml
from assay_runners.checking.context import Context, make_finding
from assay_runners.checking.findings import Finding
from assay_runners.checking.workflow_files.expressions import expressions_in, normalise
from assay_runners.checking.workflow_files.leaves import Leaf, leaves, written
from assay_runners.fleet.entries import GitHub

FILE = Path(__file__).with_name("vocabulary.toml")
SHOWN_FILE = "packages/runners/src/assay_runners/checking/rules/vocabulary.toml"
MOST_MINUTES = 360
_MINUTES_OF_OTHERS = ("${{ inputs.minutes }}", "${{ matrix.timeout_minutes }}")

_Allowed = str | list[Any]


def known_words(context: Context) -> Iterator[Finding]:
    """Nothing stands in a workflow or an action but what the vocabulary has."""
    for document in context.documents:
        table = read_vocabulary()["workflow" if document in context.workflows else "action"]
        words = _Words(table, context)
        for leaf in leaves(document.raw):
            problem = words.problem(leaf)
            if problem:
                message = f"{leaf.shown}: {problem}. If it is meant, write into {SHOWN_FILE}, for a reviewer to see: {_line_for(leaf)}"
                yield make_finding("vocabulary", document, leaf.line, message)


@cache
def read_vocabulary() -> dict[str, Any]:
    """The tables of the file. Raises: UsageError if it is none, or says what nothing can be."""
    read = read_toml(FILE)
    for place, allowed in (read["workflow"] | read["action"]).items():
        if not isinstance(allowed, list) and allowed not in _KINDS:
            kinds = ", ".join(map(repr, _KINDS))
            message = f"{SHOWN_FILE}: {place}: {allowed!r} is no list [...], and none of {kinds}"
            raise UsageError(message)
    return read


class _Words:
    """The places of one kind of file, and what may stand there."""

    def __init__(self, table: Mapping[str, _Allowed], context: Context) -> None:
        self._table = table
        self._patterns = [(_place_pattern(place), allowed) for place, allowed in table.items()]
        self._names = _names_of(context.fleet.github)
        self._sessions = "|".join(map(re.escape, sorted(context.sessions)))

    def problem(self, leaf: Leaf) -> str:
        """Why it may not be there; "" where it may."""
        allowed = [one for pattern, one in self._patterns if pattern.fullmatch(leaf.place)]
        if leaf.place in self._table:
            allowed = [self._table[leaf.place]]
        if not allowed:
            return "new to our workflows"
        if any(self._is_allowed(leaf.value, one) for one in allowed):
            return ""
        if any(self._is_allowed(_quoted_otherwise(leaf.value), one) for one in allowed):
            return (
                f"write {leaf.value} {'without' if isinstance(leaf.value, str) else 'with'} quotes"
            )
        return f"{written(leaf.value)!r} is new there"

    def _is_allowed(self, value: object, allowed: _Allowed) -> bool:
        if isinstance(allowed, str):
            return _KINDS[allowed](value)
        return any(self._is_entry(value, entry) for entry in allowed)

    def _is_entry(self, value: object, entry: object) -> bool:
        if not isinstance(value, str) or not isinstance(entry, str):
            return isinstance(value, bool) == isinstance(entry, bool) and value == entry
        filled = re.sub(r"<(\w+)>", lambda found: self._names.get(found[1], found[0]), entry)
        pattern = re.escape(str(written(filled)))
        pattern = pattern.replace(re.escape("<sha>"), "[0-9a-f]{40}")
        pattern = pattern.replace(re.escape("<session>"), f"(?:{self._sessions})")
        return re.fullmatch(pattern, str(written(value))) is not None


def _names_of(github: GitHub) -> dict[str, str]:
    """Map `protected` and the other placeholders to the values of runners/github.toml."""
    return {
        "repository": github.repository, "protected": github.protected_ref,
        "group": github.runner_group, "hosted": github.hosted,
        "nightly": github.nightly, "reaper": github.reaper,
    }  # fmt: skip


def _line_for(leaf: Leaf) -> str:
    """The line that would allow it."""
    place = re.sub(r"^jobs\.[^.]+", "jobs.*", leaf.place)
    return f"{json.dumps(place)} = {json.dumps([written(leaf.value)], default=str)}"


def _quoted_otherwise(value: object) -> object:
    """The same with quotes, or without."""
    if not isinstance(value, str):
        return str(value)
    return int(value) if value.isdigit() else {"true": True, "false": False}.get(value, value)


def _place_pattern(place: str) -> re.Pattern[str]:
    return re.compile(re.escape(place).replace(r"\*", r"[^.\[\]]+"))


def _is_minutes(value: object) -> bool:
    if isinstance(value, str):
        return value in _MINUTES_OF_OTHERS
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST_MINUTES


def _has_known_expressions(value: object) -> bool:
    known = set(map(normalise, read_vocabulary()["expressions"]))
    return isinstance(value, str) and set(expressions_in(value)) <= known


_KINDS: dict[str, Callable[[object], bool]] = {
    "text": lambda value: isinstance(value, str) and "${{" not in value,
    "words": _has_known_expressions,
    "minutes": _is_minutes,
    "nothing": lambda value: value is None or value == {},
}
