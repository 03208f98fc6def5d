"""What can go wrong with a trace, and how it is said."""

import errno
import shutil
from pathlib import Path

from assay.errors import MachineError, UsageError

_SHOWN_NAMES = 12


class TraceError(UsageError):
    """A trace that cannot be used: damaged, foreign, or asked for what it does not hold."""

    @classmethod
    def damaged(cls, path: Path, key: str, what: str) -> "TraceError":
        """A file of the trace disagrees with itself or with the index."""
        place = f"{path}: {key!r}" if key else str(path)
        return cls(
            f"{place}: {what}. The trace is damaged or was not made by assay: capture it anew."
        )

    @classmethod
    def absent(cls, folder: Path, wanted: str, present: list[str]) -> "TraceError":
        """The trace holds nothing under that name."""
        return cls(f"{folder} holds no {wanted}; it holds: {_shown(present) or 'nothing'}")

    @classmethod
    def not_empty(cls, folder: Path, names: list[str]) -> "TraceError":
        """The folder of a new trace holds something already."""
        text = f"{folder} is not empty (it holds {_shown(sorted(names))})"
        return cls(f"{text}: name a new folder for the trace")

    @classmethod
    def in_use(cls, folder: Path) -> "TraceError":
        """A second writer lost the race for a folder."""
        return cls(f"{folder} is being written by another run: name a new folder for the trace")


class StorageError(MachineError):
    """The file system refused a trace: full, read-only, forbidden."""

    @classmethod
    def refused(cls, path: Path, action: str, error: OSError) -> "StorageError":
        """The operating system's reason, with the free space where that is the reason."""
        text = f"cannot {action} {path}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            text += _free_space(path)
        return cls(text)


def _shown(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN_NAMES]) + (" ..." if len(names) > _SHOWN_NAMES else "")


def _free_space(path: Path) -> str:
    for folder in (path, *path.parents):
        try:
            return f" ({shutil.disk_usage(folder).free / 1e9:.1f} GB free there)"
        except OSError:
            continue
    return ""
