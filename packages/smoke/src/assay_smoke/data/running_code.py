"""Calls of code that is not ours: what it raises ends the check of its subject, in one sentence."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from assay.errors import AssayError, UsageError, raised_in_words


class RaisedError(UsageError):
    """A user's function, or a library's, that raised an exception or returned something else."""


class DeclinedError(RaisedError):
    """A case for which the code raised NotImplementedError: it does not claim to handle it."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is checked, by its name in reports: FILE.py:NAME, or a library's class and version."""

    name: str

    @contextmanager
    def called_for(self, case: str) -> Iterator[None]:
        """Turn whatever the code inside raises into a RaisedError that names `case`."""
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
        """The error for a result of another form."""
        return RaisedError(f"{self.name} returned {what}; it has to return {wanted}")
