"""Errors of files: one that cannot be read, one that cannot be written."""

from pathlib import Path
from typing import Self

from pydantic import ValidationError

from assay.errors import MachineError, UsageError
from assay.foreign_text import shorten


class UnreadableFileError(UsageError):
    """A file that is absent, too large, damaged, or has other content than expected."""

    @classmethod
    def of(cls, path: Path | str, problem: object, line: int | None = None) -> Self:
        """Name the file, the line and the problem. The message has one line.

        line: counts from 1; None for the whole file.
        """
        if isinstance(problem, OSError):
            problem = f"cannot be read: {problem.strerror or problem}"
        elif isinstance(problem, ValidationError):
            problem = describe_invalid(problem)
        place = f"{path}, line {line}" if line else f"{path}"
        return cls(f"{place}: {shorten(problem)}")


class DiskError(MachineError):
    """The file system refused to write a file."""

    @classmethod
    def refused(cls, path: Path, error: OSError) -> "DiskError":
        """Writing `path` failed with `error`."""
        return cls(f"cannot write {path}: {error.strerror or error}")


def describe_invalid(error: ValidationError) -> str:
    """Name the first field that violates the schema, and what is wrong with it."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(map(str, first["loc"]))
    problem = first["msg"].removeprefix("Value error, ")
    return f"{field}: {problem}" if field else problem
