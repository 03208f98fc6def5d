"""Errors for files that cannot be read or written."""

from pathlib import Path
from typing import Self

from pydantic import ValidationError

from assay.errors import MachineError, UsageError
from assay.foreign_text import shorten


class UnreadableFileError(UsageError):
    """Error for a file that is absent, too large, damaged, or has unexpected content."""

    @classmethod
    def of(cls, path: Path | str, problem: object, line: int | None = None) -> Self:
        """Make the error, with a message of one line.

        line: line number from 1; None for the whole file.
        """
        if isinstance(problem, OSError):
            problem = f"cannot be read: {problem.strerror or problem}"
        elif isinstance(problem, ValidationError):
            problem = describe_invalid(problem)
        place = f"{path}, line {line}" if line else f"{path}"
        return cls(f"{place}: {shorten(problem)}")


class DiskError(MachineError):
    """Error for a write that the file system refused."""

    @classmethod
    def refused(cls, path: Path, error: OSError) -> "DiskError":
        """Make the error for a write to `path` that failed with `error`."""
        return cls(f"cannot write {path}: {error.strerror or error}")


def describe_invalid(error: ValidationError) -> str:
    """Describe the first field that violates the schema, and why."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(map(str, first["loc"]))
    problem = first["msg"].removeprefix("Value error, ")
    return f"{field}: {problem}" if field else problem
