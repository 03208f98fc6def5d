"""Errors of run folders and processes, and their messages."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from assay.errors import MachineError, UsageError, exit_in_words

# Enough for the end of a traceback.
_TAIL_LINES = 20
# Enough for the stack of a model's code.
_STACK_LINES = 60
_TAIL_BYTES = 1 << 16


class FolderError(UsageError):
    """An output folder that cannot be used for a new run."""

    @classmethod
    def not_empty(cls, folder: Path, held: str) -> "FolderError":
        """Make the error for a folder that holds `held`."""
        return cls(f"{folder} is not empty (it holds {held}): name a new folder with --output")

    @classmethod
    def without_verdict(cls, folder: Path) -> "FolderError":
        """Make the error for the folder of a run without a verdict."""
        return cls(
            f"{folder} holds a run without a verdict: it was refused or interrupted, or is still"
            " running. Name a new folder with --output, or remove what is left of it: rm -r"
            f" {shlex.quote(str(folder))}"
        )

    @classmethod
    def in_use(cls, folder: Path) -> "FolderError":
        """Make the error for a folder that another run is writing to."""
        return cls(f"{folder} is in use by another run: name a new folder with --output")


class ForkServerError(MachineError):
    """The fork server died or failed."""

    @classmethod
    def ended(cls, how: str) -> "ForkServerError":
        """Make the error for a dead process; `how` is from `exit_in_words`."""
        return cls(f"the fork server {how}")

    @classmethod
    def refused(cls, traceback: str) -> "ForkServerError":
        """Make the error for an exception, in most cases from the import of a preloaded module."""
        return cls(f"the fork server could not start a process:\n{traceback}")


class ProcessError(MachineError):
    """A process of the run that ended without an answer."""

    @classmethod
    def died(cls, name: str, exit_code: int, log: Path) -> "ProcessError":
        """Make the error for the process `name`, with the reason and the last lines of its log."""
        how = exit_in_words(exit_code) if exit_code else "ended"
        if exit_code >= 0:
            how += " and no result" if exit_code else " without a result"
        return cls(f"the {name} process {how}.{_last_words(log)}")

    @classmethod
    def hung(cls, name: str, seconds: float, tasks: Sequence[str], log: Path) -> "ProcessError":
        """Make the error for a process that was ended by the time limit, in its open `tasks`."""
        phase = f" in {' > '.join(tasks)}" if tasks else ""
        limit = f"the time limit of {seconds:g} s (--timeout) passed"
        return cls(
            f"the {name} process did not end{phase}: {limit}.{_last_words(log, _STACK_LINES)}"
        )


def _last_words(log: Path, num_lines: int = _TAIL_LINES) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    if not lines:
        return f" It printed nothing ({log} is empty)."
    return "\n".join([f" Its last lines ({log}):", *(f"  {line}" for line in lines[-num_lines:])])
