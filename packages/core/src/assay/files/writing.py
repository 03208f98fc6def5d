"""Atomic file writes: readers see either the old content or the new."""

import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from assay.errors import MachineError


class DiskError(MachineError):
    """Error for a write that the file system refused."""

    @classmethod
    def refused(cls, path: Path, error: OSError) -> "DiskError":
        """Make the error for a write to `path` that failed with `error`."""
        return cls(f"cannot write {path}: {error.strerror or error}")


def create_temporary(path: Path) -> tuple[int, Path]:
    """Create a new file in the folder of `path`, to be renamed to `path`.

    Its name is unpredictable and must not exist yet, so that a link cannot redirect the write.

    Returns: the descriptor, open for writing, and the file.
    Raises: OSError.
    """
    temporary = path.with_name(f".{secrets.token_hex(8)}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    return os.open(temporary, flags, 0o666), temporary


def write_whole(path: Path, content: str | bytes | Iterable[str]) -> Path:
    """Write `content` to a temporary file, then rename it to `path`. Text is written as UTF-8.

    content: the whole, or its parts in order. A symbolic link at `path` is replaced, not followed.
    Raises: DiskError if it cannot be written. `path` is then unchanged.
    """
    try:
        descriptor, temporary = create_temporary(path)
    except OSError as error:
        raise DiskError.refused(path, error) from error
    parts = [content] if isinstance(content, (str, bytes)) else content
    try:
        with os.fdopen(descriptor, "wb") as file:
            for part in parts:
                if isinstance(part, str):
                    part = part.encode("utf-8", errors="backslashreplace")  # noqa: PLW2901
                file.write(part)
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise DiskError.refused(path, error) from error
        raise
    return path
