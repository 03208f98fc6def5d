"""Calls code under check. An exception ends the check of its subject with one message."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from assay.errors import AssayError, UsageError, raised_in_words


class RaisedError(UsageError):
    """A function of a user or library that raised an exception or returned a malformed result."""


class DeclinedError(RaisedError):
    """A case that the code declined by NotImplementedError."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The code under check."""

    name: str
    """Name in reports: FILE.py:NAME, or a library's class and version."""

    @contextmanager
    def called_for(self, case: str) -> Iterator[None]:
        """Turn any exception in the block into a RaisedError that names `case`."""
        try:
            yield
        except AssayError:
            raise
        except NotImplementedError as error:
            raise DeclinedError(f"{self.name} declines {case} ({error})") from error
        except (Exception, SystemExit) as error:
            raise RaisedError(
                f"{self.name} raised {raised_in_words(error)}\n  for {case}"
            ) from error

    def returned(self, what: str, wanted: str) -> RaisedError:
        """Make the error for a malformed result."""
        return RaisedError(f"{self.name} returned {what}; it must return {wanted}")
