"""GitHub expressions, normalized so that rules see through the ways to write one."""

import re
from collections.abc import Iterator

_LITERAL = r"'(?:[^']|'')*'"
# Braces inside a literal do not end the expression.
_EXPRESSION = re.compile(rf"\$\{{\{{((?:{_LITERAL}|(?!\}}\}}).)*?)\}}\}}", re.DOTALL)
_INDEX = re.compile(r"\[\s*'([^']*)'\s*\]")


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
