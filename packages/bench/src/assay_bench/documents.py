"""The documents of the task `next-text`: which of four pieces of text follows?

Made from the prompts of the package, so that nothing is downloaded. Any model that learned
anything from text does better than one in four.
"""

import random
from collections.abc import Sequence
from typing import TypedDict

CONTEXT_LENGTH = 48
PIECE_LENGTH = 8
NUM_CHOICES = 4


class Document(TypedDict):
    """One question; `label` is the place of the right choice."""

    context: str
    choices: list[str]
    label: int


def next_text_documents(texts: Sequence[str], seed: int = 0) -> list[Document]:
    """Questions from `texts`, in characters: a context, what follows, and what follows elsewhere.

    No two questions ask for the same piece. Wrong choices come from other texts.
    """
    rng = random.Random(seed)  # noqa: S311 - a reproducible choice, no secret
    pieces = [
        (number, text[start - CONTEXT_LENGTH : start], text[start : start + PIECE_LENGTH])
        for number, text in enumerate(texts)
        for start in range(CONTEXT_LENGTH, len(text) - PIECE_LENGTH + 1, PIECE_LENGTH)
    ]
    documents: list[Document] = []
    for number, context, right in pieces:
        others = sorted({piece for other, _, piece in pieces if other != number} - {right})
        choices = rng.sample(others, NUM_CHOICES - 1)
        label = rng.randrange(NUM_CHOICES)
        choices.insert(label, right)
        documents.append(Document(context=context, choices=choices, label=label))
    return documents
