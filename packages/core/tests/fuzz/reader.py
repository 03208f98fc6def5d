"""A reader of files of others: a valid sample, how it is read, and what a mutated one may lead to."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from assay.errors import AssayError
from packages.core.tests.fuzz.mutations.hostile_values import FORGED_LINE

# A message may name several files, each in a line; it never quotes a whole document.
_LONGEST_MESSAGE = 4_000
_LARGEST_BYTES = 16 << 20


class NotedError(AssayError):
    """A conclusion that says of itself that it may have been changed."""


@dataclass(frozen=True, slots=True)
class Reader:
    """A reader, and a sample that it reads."""

    name: str
    make: Callable[[Path], None]
    """Write a valid sample into an empty folder."""

    read: Callable[[Path], object]
    """Read the sample as its user does. Returns: the conclusion. Raises: AssayError."""

    sealed: bool = False
    """Its files carry digests: another conclusion than the sample's is a finding."""

    mutated: tuple[str, ...] = ("**/*",)
    """Patterns of the files to mutate."""

    slow: bool = False
    """Making the sample takes seconds: short runs leave it out."""

    def files(self, folder: Path) -> list[Path]:
        """List the files to mutate, in an order that does not depend on the file system."""
        found = {file for pattern in self.mutated for file in folder.glob(pattern)}
        return sorted(file for file in found if _can_be_mutated(file))


def _can_be_mutated(file: Path) -> bool:
    """Leave out what an earlier mutation has made of a file."""
    return not file.is_symlink() and file.is_file() and file.stat().st_size < _LARGEST_BYTES


def problem_with_message(error: AssayError) -> str | None:
    """Say what is wrong with an error's message; None where it is one that a person can read."""
    message = str(error)
    if any(line.lstrip().startswith(FORGED_LINE) for line in message.splitlines()):
        return "its message quotes more than one line of the file"
    if len(message) > _LONGEST_MESSAGE:
        return f"its message has {len(message):,} characters"
    return None if message.strip() else "its message is empty"
