"""Errors of run folders and processes, and their messages."""

import signal
from pathlib import Path

from assay.errors import MachineError, UsageError

# Enough for the end of a traceback; the whole text is in the log.
_TAIL_LINES = 20


class FolderError(UsageError):
    """An output folder that cannot be used for a new run."""

    @classmethod
    def not_empty(cls, folder: Path, names: list[str]) -> "FolderError":
        """The output folder is not empty; `names`: its entries."""
        held = "another run" if "run.json" in names else ", ".join(sorted(names)[:4])
        return cls(f"{folder} is not empty (it holds {held}): name a new folder with --output")

    @classmethod
    def in_use(cls, folder: Path) -> "FolderError":
        """Another run started in the folder at the same time."""
        return cls(f"{folder} was just taken by another run: name a new folder with --output")


class DiskError(MachineError):
    """The file system refused a file of the run."""

    @classmethod
    def refused(cls, path: Path, error: OSError) -> "DiskError":
        """Writing `path` failed with `error`."""
        return cls(f"cannot write {path}: {error.strerror or error}")


class ProcessError(MachineError):
    """A process of the run that ended without an answer."""

    @classmethod
    def died(cls, name: str, exit_code: int, log: Path) -> "ProcessError":
        """The message has the reason for its end and the last lines of its log.

        name: of the process, such as "candidate".
        """
        if exit_code == -signal.SIGKILL:
            how = "was killed (SIGKILL): the machine may have run out of memory"
        elif exit_code < 0:
            how = f"was ended by {_signal_name(-exit_code)}"
        elif exit_code:
            how = f"ended with exit code {exit_code} and no result"
        else:
            how = "ended without a result"
        return cls(f"the {name} process {how}.{_last_words(log)}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_words(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    if not lines:
        return f" It printed nothing ({log} is empty)."
    return "\n".join([f" Its last lines ({log}):", *(f"  {line}" for line in lines[-_TAIL_LINES:])])
