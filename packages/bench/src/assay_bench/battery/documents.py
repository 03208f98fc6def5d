"""Documents of the offline tasks, which depend only on the version of Python.

They contain sums, and text of the standard library that no micro model was trained on. `source` names the
piece of text of an item: items of one piece form a cluster.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from assay.models.micro.recipes import standard_library_text

Document = Mapping[str, Any]

_SEED = 0
_PIECE_LENGTH = 4_096
_MAX_ITEMS = 500

_CHOICE_CONTEXT, _CHOICE_LENGTH, _NUM_CHOICES = 96, 12, 4
_CLOZE_CONTEXT, _LETTERS_GIVEN = 96, 3
_ROLLING_LENGTH, _MAX_TEXTS = 256, 250
# Small enough that a micro model learns some sums.
_LARGEST_NUMBER = 49

_WORD = re.compile(r"(?<=[a-z,] )[a-z]{5,12}(?=[ .,\n])")


def documents_of(task: str) -> Sequence[Document]:
    """Return the documents of an offline task. Raises: KeyError for any other task."""
    return _MAKERS[task]()


def _next_text() -> Sequence[Document]:
    """Make contexts, each with its continuation and three continuations of other contexts."""
    rng = random.Random(_SEED)  # noqa: S311 - a reproducible choice, not a secret
    pieces = _pieces()
    places = [
        (number, start)
        for number, piece in enumerate(pieces)
        for start in range(_CHOICE_CONTEXT, len(piece) - _CHOICE_LENGTH, 256)
    ]
    documents: list[Document] = []
    for number, start in rng.sample(places, min(_MAX_ITEMS, len(places))):
        right = pieces[number][start : start + _CHOICE_LENGTH]
        choices = [right]
        while len(choices) < _NUM_CHOICES:
            other, at = rng.choice(places)
            wrong = pieces[other][at : at + _CHOICE_LENGTH]
            if wrong not in choices:
                choices.append(wrong)
        rng.shuffle(choices)
        documents.append(
            {
                "context": pieces[number][start - _CHOICE_CONTEXT : start],
                "choices": choices,
                "label": choices.index(right),
                "source": f"piece {number}",
            }
        )
    return documents


def _cloze() -> Sequence[Document]:
    """Make texts that end inside a word, each with the rest of the word."""
    rng = random.Random(_SEED)  # noqa: S311 - reproducible
    found = [
        (number, match)
        for number, piece in enumerate(_pieces())
        for match in _WORD.finditer(piece, _CLOZE_CONTEXT)
    ]
    return [
        {
            "context": match.string[
                match.start() - _CLOZE_CONTEXT : match.start() + _LETTERS_GIVEN
            ],
            "rest": match[0][_LETTERS_GIVEN:],
            "source": f"piece {number}",
        }
        for number, match in rng.sample(found, min(_MAX_ITEMS, len(found)))
    ]


def _library_text() -> Sequence[Document]:
    return [
        {"text": piece[start : start + _ROLLING_LENGTH], "source": f"piece {number}"}
        for number, piece in enumerate(_pieces())
        for start in range(0, len(piece) - _ROLLING_LENGTH, 2 * _ROLLING_LENGTH)
    ][:_MAX_TEXTS]


def _addition() -> Sequence[Document]:
    rng = random.Random(_SEED)  # noqa: S311 - reproducible
    pairs = [(a, b) for a in range(_LARGEST_NUMBER + 1) for b in range(_LARGEST_NUMBER + 1)]
    return [{"question": f"{a}+{b}=", "sum": str(a + b)} for a, b in rng.sample(pairs, _MAX_ITEMS)]


def _pieces() -> list[str]:
    """Return the held-out text in pieces."""
    _, held_out = standard_library_text()
    text = held_out.decode(errors="ignore")
    return [text[start : start + _PIECE_LENGTH] for start in range(0, len(text), _PIECE_LENGTH)]


_MAKERS: Mapping[str, Callable[[], Sequence[Document]]] = {
    "next-text": _next_text,
    "cloze": _cloze,
    "library-text": _library_text,
    "addition": _addition,
}

TASKS = tuple(_MAKERS)
