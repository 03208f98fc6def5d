"""Expressions that select ids, in the syntax of `pytest -k`: words, and, or, not, parentheses.

A word matches anywhere in an id, in any case.
"""

import re
from collections.abc import Callable

from assay.errors import UsageError

Matches = Callable[[str], bool]

_TOKEN = re.compile(r"\s*([()]|[\w:+.\[\]\\/-]+)")
_END = ""


def compile_expression(text: str) -> Matches:
    """Return a function that tests whether an id matches `text`.

    Raises: UsageError.
    """
    source: list[str] = []
    depth, wants_word = 0, True
    for symbol, column in _tokens(text):
        if wants_word and symbol in ("and", "or", ")", _END):
            raise _error(text, column, "a word of an id was expected")
        if not wants_word and depth and symbol not in ("and", "or", ")"):
            raise _error(text, column, "a closing parenthesis was expected")
        if not wants_word and not depth and symbol not in ("and", "or", _END):
            raise _error(text, column, "and, or, or the end was expected")
        wants_word = symbol in ("and", "or", "not", "(")
        depth += (symbol == "(") - (symbol == ")")
        is_word = symbol not in ("and", "or", "not", "(", ")", _END)
        source.append(f"({symbol.lower()!r} in name)" if is_word else symbol)
    code = compile(" ".join(source), "-k", "eval")
    return lambda name: bool(eval(code, {"name": name.lower()}))  # noqa: S307 - words are quoted


def _tokens(text: str) -> list[tuple[str, int]]:
    """Split into words, parentheses and the end, each with its column from 1."""
    tokens, position = [], 0
    while rest := text[position:].lstrip():
        found = _TOKEN.match(text, position)
        if found is None:
            column = len(text) - len(rest) + 1
            raise _error(text, column, f"{rest[0]!r} cannot be in an id")
        tokens.append((found[1], found.start(1) + 1))
        position = found.end()
    return [*tokens, (_END, len(text) + 1)]


def _error(text: str, column: int, problem: str) -> UsageError:
    """Describe the problem at `column`, counted from 1."""
    return UsageError(
        f"-k {text!r}: {problem} at column {column}; as in -k 'fsdp and not (lora or 4)'"
    )
