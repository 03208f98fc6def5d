"""Expressions that select ids, in the syntax of `pytest -k`: words, and, or, not, parentheses.

A word matches anywhere in an id, in any case.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from assay.errors import UsageError

Matches = Callable[[str], bool]

_TOKEN = re.compile(r"\s*(?:(?P<bracket>[()])|(?P<word>[\w:+.\[\]\\/-]+))")


def make_expression_error(text: str, column: int, problem: str) -> UsageError:
    """Describe the problem at `column`, counted from 1."""
    return UsageError(
        f"-k {text!r}: {problem} at column {column}; as in -k 'fsdp and not (lora or 4)'"
    )


def compile_expression(text: str) -> Matches:
    """Return a function that tests whether an id matches `text`.

    Raises: UsageError.
    """
    reader = _Reader(text, _tokens(text))
    matches = reader.read_or()
    if reader.position < len(reader.tokens):
        raise reader.error("and, or, or the end was expected")
    return matches


def _tokens(text: str) -> list[tuple[str, int]]:
    """Split into words and parentheses, each with its column from 1."""
    tokens, position = [], 0
    while text[position:].strip():
        found = _TOKEN.match(text, position)
        if found is None:
            column = position + len(text[position:]) - len(text[position:].lstrip()) + 1
            raise make_expression_error(text, column, f"{text[column - 1]!r} cannot be in an id")
        kind = found.lastgroup or "word"
        tokens.append((found[kind], found.start(kind) + 1))
        position = found.end()
    return tokens


@dataclass(slots=True)
class _Reader:
    """A recursive-descent parser: `not` binds closest, then `and`, then `or`."""

    text: str
    tokens: list[tuple[str, int]]
    position: int = 0

    def read_or(self) -> Matches:
        parts = [self._read_and()]
        while self._takes("or"):
            parts.append(self._read_and())
        return lambda name: any(part(name) for part in parts)

    def _read_and(self) -> Matches:
        parts = [self._read_not()]
        while self._takes("and"):
            parts.append(self._read_not())
        return lambda name: all(part(name) for part in parts)

    def _read_not(self) -> Matches:
        if self._takes("not"):
            part = self._read_not()
            return lambda name: not part(name)
        if self._takes("("):
            part = self.read_or()
            if not self._takes(")"):
                raise self.error("a closing parenthesis was expected")
            return part
        if self.position == len(self.tokens) or self._next() in ("and", "or", ")"):
            raise self.error("a word of an id was expected")
        word = self._next().lower()
        self.position += 1
        return lambda name: word in name.lower()

    def _next(self) -> str:
        return self.tokens[self.position][0]

    def _takes(self, token: str) -> bool:
        found = self.position < len(self.tokens) and self._next() == token
        self.position += found
        return found

    def error(self, problem: str) -> UsageError:
        ended = self.position == len(self.tokens)
        column = len(self.text) + 1 if ended else self.tokens[self.position][1]
        return make_expression_error(self.text, column, problem)
