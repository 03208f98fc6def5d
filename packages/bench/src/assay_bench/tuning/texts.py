"""Texts to train on, each with a part that is held out. Importing it imports no torch."""

import random
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash
from pydantic import BaseModel

from assay.errors import UsageError
from assay.files import read_record_lines, read_text

# One document in so many is held out, chosen by its content: the same ones wherever they are read,
# and equal documents are on the same side.
HELD_OUT_SHARE = 20

# Sums of numbers below it: 10,000 of them.
_LARGEST = 100

_MOST_BYTES = 1 << 30


class TextError(UsageError):
    """A text that cannot be trained on."""


@dataclass(frozen=True, slots=True)
class Text:
    """The two parts of a text; no document is in both."""

    training: str
    held_out: str

    @property
    def hash(self) -> str:
        """Of both parts."""
        digest = xxhash.xxh3_128(self.training.encode())
        digest.update(b"\0")
        digest.update(self.held_out.encode())
        return digest.hexdigest()


def read_training_text(source: str, folder: Path) -> Text:
    """The text `source`: one of BUILT_IN, or a file. The rule for files: DataSource of a recipe.

    folder: at which a relative path begins.
    Raises: TextError if a file holds no documents, or too few to hold any out.
    """
    if source in BUILT_IN:
        return BUILT_IN[source]()
    path = folder / source
    documents = _read_documents(path)
    text = _split(documents, "\n\n")
    if not text.training or not text.held_out:
        raise TextError(
            f"{path}: of {len(documents)} documents, one in {HELD_OUT_SHARE} is held out by its content,"
            f" and that leaves {'nothing to train on' if not text.training else 'none'}: add documents"
        )
    return text


def _standard_library() -> Text:
    """The source of the running Python's standard library, split by files."""
    from assay.models.micro_training.standard_library import standard_library_text

    training, held_out = standard_library_text()
    return Text(training.decode(errors="replace"), held_out.decode(errors="replace"))


def _sums() -> Text:
    """Lines like `37+45=82`, of all numbers below 100, in an order without pattern."""
    numbers = range(_LARGEST)
    documents = [f"{one}+{other}={one + other}" for one in numbers for other in numbers]
    random.Random(0).shuffle(documents)  # noqa: S311 - a reproducible order, no secret
    return _split(documents, "\n")


BUILT_IN: Mapping[str, Callable[[], Text]] = {
    "standard-library": _standard_library,
    "sums": _sums,
}


def _read_documents(path: Path) -> list[str]:
    if path.suffix == ".jsonl":
        return [line.text for line in read_record_lines(_Document, path)]
    # A text may be far larger than a record.
    text = read_text(path, _MOST_BYTES)
    return [part for part in re.split(r"\n\s*\n", text) if part.strip()]


class _Document(BaseModel):
    """A line of a JSONL file."""

    text: str


def _split(documents: Sequence[str], separator: str) -> Text:
    parts: dict[bool, list[str]] = {True: [], False: []}
    for document in documents:
        parts[zlib.crc32(document.encode()) % HELD_OUT_SHARE == 0].append(document)
    return Text(separator.join(parts[False]), separator.join(parts[True]))
