"""What is kept between runs and can be made again: where it lies, and who may write it."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_folder() -> Path:
    """The user's cache of assay, which need not exist.

    Source: XDG Base Directory Specification 0.8, $XDG_CACHE_HOME; a relative path there is ignored.
    """
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "assay"


@contextmanager
def locked(lock: Path) -> Iterator[None]:
    """Inside, no other process is: one that asks for the same file waits.

    The system frees it where a process is killed.
    """
    with lock.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
