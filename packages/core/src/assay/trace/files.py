"""File access of traces: a local folder, written crash-safe, read by memory mapping; and its errors.

Other modules use names inside of a `Folder`; `remote` has one behind a URL. Without fsync, a trace
survives a kill of its writer (the kernel has the pages), not of the machine.
"""

import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

from assay.errors import AssayError, MachineError, UsageError
from assay.files import UnreadableFileError, create_temporary, read_bytes
from assay.foreign_text import one_line, shorten

if TYPE_CHECKING:
    import torch

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


def require_fields(folder: Path, record: str, found: Iterable[str], known: Iterable[str]) -> None:
    """Require the fields that this version writes: a default would pass for a measured value.

    record: its name. Raises: TraceError for a missing or unknown field.
    """
    names, needed = set(found), set(known)
    if names != needed:
        lacking = sorted(needed - names)
        verb, others = ("lacks", lacking) if lacking else ("holds", sorted(names - needed))
        raise TraceError(
            f"{shorten(folder)}: {shorten(record)} {verb} {_shown(others)}, unlike in this version of"
            " assay: record it again with `assay capture`, or use the version that recorded it"
        )


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


# Limit for a manifest, an index or an attached JSON value: ten times that of a large trace.
_MAX_BYTES = 256 << 20


@contextmanager
def _refusals(path: Path, action: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError.refused(path, action, error) from error


class OutStream:
    """A new file that gets its name when it is complete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _refusals(path, "create"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor, self._temporary = create_temporary(path)

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        """Write `data` at byte `offset`, without a reference to it afterwards."""
        view = memoryview(data)
        with _refusals(self.path, "write"):
            while view:
                written = os.pwrite(self._descriptor, view, offset)
                view, offset = view[written:], offset + written

    def commit(self) -> None:
        """Close the file and give it its name."""
        with _refusals(self.path, "write"):
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)
            self._temporary.replace(self.path)

    def discard(self) -> None:
        """Delete the file unless it was committed. Never raises, as error handlers call it."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            with suppress(OSError):
                os.close(descriptor)
            with suppress(OSError):
                self._temporary.unlink()


class LineFile:
    """An append-only text file; only its last line can be incomplete, and readers ignore that."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with _refusals(path, "create"):
            self._descriptor = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666
            )

    def append(self, line: str) -> None:
        """Append one line, or nothing after an error."""
        size = os.fstat(self._descriptor).st_size
        view = memoryview(line.encode() + b"\n")
        with _refusals(self._path, "append to"):
            try:
                while view:
                    view = view[os.write(self._descriptor, view) :]
            except OSError:
                os.ftruncate(self._descriptor, size)
                raise

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):
            os.close(self._descriptor)


class Folder:
    """The folder of a trace; it opens no file outside of itself."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, folder: str | Path) -> "Folder":
        """Create the folder of a new trace.

        Raises: TraceError if it is not empty, StorageError if it cannot be created.
        """
        path = Path(folder)
        with _refusals(path, "create the folder"):
            path.mkdir(parents=True, exist_ok=True)
            names = os.listdir(path)  # noqa: PTH208 - names only
        if names:
            raise TraceError.not_empty(path, names)
        return cls(path)

    @property
    def is_lost(self) -> bool:
        """True after storage behind a URL has failed: further writes are dropped."""
        return False

    def create_exclusive(self, name: str, text: str) -> None:
        """Write a new file.

        Raises: TraceError if another writer has created it.
        """
        path = self.path / name
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            raise TraceError.in_use(self.path) from None
        except OSError as error:
            raise StorageError.refused(path, "create", error) from error
        with _refusals(path, "write"), os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)

    def stream(self, name: str) -> OutStream:
        """Create a file to write in parts."""
        return OutStream(self.path / name)

    def replace(self, name: str, text: str) -> int:
        """Write or replace a file. Returns: its size in bytes."""
        stream = self.stream(name)
        data = text.encode()
        try:
            stream.write_at(0, data)
            stream.commit()
        except StorageError:
            stream.discard()
            raise
        return len(data)

    def lines(self, name: str) -> LineFile:
        """Create an append-only file."""
        return LineFile(self.path / name)

    def existing(self, name: str) -> Path:
        """Return the path of an existing file.

        Raises: TraceError if it is missing, or a link leads out of the folder.
        """
        path = self.path / name
        try:
            resolved = path.resolve(strict=True)
        except (OSError, RuntimeError):
            raise TraceError.damaged(path, "", "the file is missing") from None
        if not resolved.is_relative_to(self.path.resolve()):
            raise TraceError.damaged(path, "", f"the file lies outside of the trace ({resolved})")
        if not resolved.is_file():
            raise TraceError.damaged(path, "", "not a file")
        return path

    def read(self, path: Path) -> bytes:
        """Read a file. path: from `existing`."""
        return read_bytes(path, _MAX_BYTES)

    def map(self, path: Path, size_bytes: int) -> "torch.UntypedStorage":
        """Map a file into memory: pages are read on access, changes stay in this process.

        path: from `existing`. Raises: TraceError if it cannot be mapped.
        """
        import torch

        try:
            storage = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=size_bytes)
        except RuntimeError as error:  # torch words the operating system's errors itself
            what = f"mapping failed ({error})"
            raise TraceError.damaged(path, "", what) from None
        return cast("torch.UntypedStorage", storage)  # the stub names its base classes
