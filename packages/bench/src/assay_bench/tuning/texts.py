"""Training texts, each with a held-out part. Imports no torch."""

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

# One document in 20 is held out. The choice depends only on its content, so equal documents are in the
# same part on every machine.
HELD_OUT_SHARE = 20

# 10,000 sums.
_NUM_SUMMANDS = 100

_MAX_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Text:
    """The two parts of a text, which share no document."""

    training: str
    held_out: str

    @property
    def hash(self) -> str:
        """Hash both parts."""
        digest = xxhash.xxh3_128(self.training.encode())
        digest.update(b"\0")
        digest.update(self.held_out.encode())
        return digest.hexdigest()


def read_training_text(source: str, folder: Path) -> Text:
    """Read a built-in text or a file in the format of `DataSource`.

    folder: folder of a relative path.
    Raises: UsageError if one part of a file's text would be empty.
    """
    if source in BUILT_IN:
        return BUILT_IN[source]()
    path = folder / source
    documents = _read_documents(path)
    text = _split(documents, "\n\n")
    if not text.training or not text.held_out:
        raise UsageError(
            f"{path}: one in {HELD_OUT_SHARE} of {len(documents)} documents is held out by its content;"
            f" the {'training' if not text.training else 'held-out'} part is empty: add documents"
        )
    return text


def _standard_library() -> Text:
    """Read the source of the running Python's standard library, split by files."""
    from assay.models.micro.standard_library import standard_library_text

    training, held_out = standard_library_text()
    return Text(training.decode(errors="replace"), held_out.decode(errors="replace"))


def _sums() -> Text:
    """Make lines like `37+45=82` of all numbers below 100, shuffled."""
    numbers = range(_NUM_SUMMANDS)
    documents = [f"{one}+{other}={one + other}" for one in numbers for other in numbers]
    random.Random(0).shuffle(documents)  # noqa: S311 - reproducible
    return _split(documents, "\n")


BUILT_IN: Mapping[str, Callable[[], Text]] = {
    "standard-library": _standard_library,
    "sums": _sums,
}


def _read_documents(path: Path) -> list[str]:
    if path.suffix == ".jsonl":
        return [line.text for line in read_record_lines(_Document, path)]
    text = read_text(path, _MAX_BYTES)
    return [part for part in re.split(r"\n\s*\n", text) if part.strip()]


class _Document(BaseModel):
    """A line of a JSONL file."""

    text: str


def _split(documents: Sequence[str], separator: str) -> Text:
    parts: dict[bool, list[str]] = {True: [], False: []}
    for document in documents:
        parts[zlib.crc32(document.encode()) % HELD_OUT_SHARE == 0].append(document)
    return Text(separator.join(parts[False]), separator.join(parts[True]))
