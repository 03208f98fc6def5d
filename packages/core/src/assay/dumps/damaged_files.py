"""Damaged files of a dump. It is read without them, and cannot pass."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from assay.dumps.protocol import DumpedTensor
from assay.files import UnreadableFileError


class DamagedFiles:
    """The files of a dump that cannot be read."""

    def __init__(self) -> None:
        self._errors: list[UnreadableFileError] = []

    @contextmanager
    def skipped(self) -> Iterator[None]:
        """Leave the context at the first unreadable file, and keep its error."""
        try:
            yield
        except UnreadableFileError as error:
            self._errors.append(error)

    def list_problems(self, tensors: Sequence[DumpedTensor]) -> list[str]:
        """Return the errors.

        tensors: those of the readable files.
        Raises: UnreadableFileError for the first damaged file if `tensors` is empty.
        """
        if self._errors and not tensors:
            raise self._errors[0]
        return [str(error) for error in self._errors]
