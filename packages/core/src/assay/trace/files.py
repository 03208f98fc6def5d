"""File access of traces: a local folder, written crash-safe, read by memory mapping.

Other modules use names inside of a `Folder`; `uploading` has one behind a URL. Without fsync, a trace
survives a kill of its writer (the kernel has the pages), not of the machine.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

from assay.files import create_temporary, read_bytes
from assay.trace.errors import StorageError, TraceError

if TYPE_CHECKING:
    import torch

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
