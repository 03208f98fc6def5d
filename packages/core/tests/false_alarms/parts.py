"""A part of a corpus, for machines that have no hour to spare at once."""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Part:
    """The `number`-th of `of` parts, counted from 1; together they have every variant once."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> "Part":
        """Of a text such as "2/4". Raises: argparse.ArgumentTypeError for any other."""
        number, _, of = text.partition("/")
        if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
            raise argparse.ArgumentTypeError(f"{text!r} is no part such as 2/4")
        return cls(int(number), int(of))

    def take(self, variants: Iterable[V], golden_of: Callable[[V], str]) -> list[V]:
        """The variants of this part: all that share a golden, and about as many as in the others."""
        sharing: dict[str, list[V]] = {}
        for variant in variants:
            sharing.setdefault(golden_of(variant), []).append(variant)
        parts: list[list[V]] = [[] for _ in range(self.of)]
        for some in sorted(sharing.values(), key=len, reverse=True):
            min(parts, key=len).extend(some)
        return parts[self.number - 1]
