"""Errors of traces, and their messages."""

import errno
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from assay.errors import AssayError, MachineError, UsageError
from assay.files import UnreadableFileError
from assay.foreign_text import one_line, shorten

_SHOWN_NAMES = 12
_SHOWN_DAMAGE = 8
_ADVICE = "The trace is damaged or was not made by assay: capture it again."


class TraceError(UsageError):
    """A trace that is damaged, of another tool, or without a requested part."""

    @classmethod
    def damaged(cls, path: Path, key: str, what: str) -> "TraceError":
        """Report a file that contradicts itself or the index.

        key: of the tensor or part of the file, "" for the whole; what: the contradiction.
        """
        place = f"{shorten(path)}: {shorten(repr(key))}" if key else shorten(path)
        return cls(f"{place}: {shorten(what)}. {_ADVICE}")

    @classmethod
    def changed(cls, folder: Path, damage: Sequence[str], advice: str) -> "TraceError":
        """Report files whose hashes differ from the recorded ones.

        damage: a line for each file; advice: the next step of the user.
        """
        lines = "".join(f"\n  {line}" for line in damage[:_SHOWN_DAMAGE])
        if len(damage) > _SHOWN_DAMAGE:
            lines += f"\n  and {len(damage) - _SHOWN_DAMAGE:,} more files"
        return cls(
            f"{folder} changed since its capture. These hashes differ from the recorded ones:{lines}\n"
            f"{advice}"
        )

    @classmethod
    def of_file(cls, error: UnreadableFileError) -> "TraceError":
        """Report a file that cannot be read."""
        return cls(f"{error}. {_ADVICE}")

    @classmethod
    def absent(cls, folder: Path, wanted: str, present: list[str]) -> "TraceError":
        """Report a missing part; `present`: the names in the trace."""
        return cls(f"{folder} holds no {wanted}; it holds: {_shown(present) or 'nothing'}")

    @classmethod
    def not_empty(cls, folder: object, names: list[str]) -> "TraceError":
        """Report that the folder of a new trace is not empty."""
        text = f"{folder} is not empty (it holds {_shown(sorted(names))})"
        return cls(f"{text}: name a new folder for the trace")

    @classmethod
    def in_use(cls, folder: object) -> "TraceError":
        """Report that another writer created a trace in the folder at the same time."""
        return cls(f"{folder} is being written by another run: name a new folder for the trace")


class StorageError(MachineError):
    """A trace that cannot be written or fetched: a full or read-only disk, a missing bucket."""

    @classmethod
    def refused(cls, path: Path, action: str, error: OSError) -> "StorageError":
        """Report an error of the operating system, with the free space of a full disk."""
        text = f"cannot {action} {path}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            text += _free_space(path)
        return cls(text)


@contextmanager
def client_errors(action: str, url: object) -> Iterator[None]:
    """Raise a StorageError for any error of a storage client that does `action` on `url`."""
    try:
        yield
    except AssayError:
        raise
    except Exception as error:
        raise StorageError(f"cannot {action} {url}: {error_in_words(error)}") from error


def error_in_words(error: Exception) -> str:
    """Return type and text of a storage client's error, without URL queries, which can hold keys."""
    text = re.sub(r"\?[^\s\"']+", "", one_line(str(error)))
    return f"{type(error).__name__}: {shorten(text)}" if text else type(error).__name__


def _shown(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN_NAMES]) + (" ..." if len(names) > _SHOWN_NAMES else "")


def _free_space(path: Path) -> str:
    for folder in (path, *path.parents):
        try:
            return f" ({shutil.disk_usage(folder).free / 1e9:.1f} GB free there)"
        except OSError:
            continue
    return ""
