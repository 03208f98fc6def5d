"""The cache folder, and locks for its writers."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_folder() -> Path:
    """Return the user's cache folder of assay, which may not exist.

    Source: XDG Base Directory Specification 0.8, $XDG_CACHE_HOME; a relative path there is ignored.
    """
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "assay"


@contextmanager
def locked(lock: Path) -> Iterator[None]:
    """Exclude other processes that lock the same file; they wait. A kill frees the lock."""
    with lock.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
