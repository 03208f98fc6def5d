"""The values of a file, each with its place, and the GitHub expressions in them.

Expressions are normalized, so that rules see through the ways to write one.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ruamel.yaml.comments import CommentedMap, CommentedSeq

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
