"""Pipes between this process and those that it starts."""

import json
import os
import select
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

_CHUNK_BYTES = 1 << 16


class Pipe:
    """The two descriptors of a pipe, as opened in this process."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        self._open = {self.reader, self.writer}

    def close_reader(self) -> None:
        """Close this process's copy of the reading end."""
        self._close(self.reader)

    def close_writer(self) -> None:
        """Close this process's copy of the writing end."""
        self._close(self.writer)

    def close(self) -> None:
        """Close both ends if they are open."""
        self.close_reader()
        self.close_writer()

    def _close(self, descriptor: int) -> None:
        if descriptor in self._open:
            self._open.discard(descriptor)
            os.close(descriptor)


class LinePipe(Pipe):
    """A pipe whose reader gets JSON objects, one a line."""

    def __init__(self) -> None:
        super().__init__()
        os.set_blocking(self.reader, False)
        self._partial = b""
        self.ended = False

    def read_lines(self) -> list[dict[str, Any]]:
        """Return the objects written since the last call. Sets `ended` once all writers are closed."""
        while not self.ended:
            try:
                chunk = os.read(self.reader, _CHUNK_BYTES)
            except BlockingIOError:
                break
            self.ended = not chunk
            self._partial += chunk
        *lines, self._partial = self._partial.split(b"\n")
        return [json.loads(line) for line in lines]

    def wait(self, seconds: float | None = None) -> None:
        """Wait until there is something to read, at most `seconds`."""
        if not self.ended:
            select.select([self.reader], [], [], seconds)

    def read_to_end(self, deadline: float) -> None:
        """Wait until all writers are closed, at most until `deadline` (of `time.monotonic`)."""
        while not self.ended and (left := deadline - time.monotonic()) > 0:
            self.wait(left)
            self.read_lines()


def wait_for_any(pipes: tuple[LinePipe, ...], seconds: float) -> None:
    """Wait until one of `pipes` can be read, at most `seconds`."""
    readable = [pipe.reader for pipe in pipes if not pipe.ended]
    select.select(readable, [], [], seconds)


P = TypeVar("P", bound=Pipe)


@contextmanager
def opened(kind: type[P]) -> Iterator[P]:
    """Open a pipe, and close it on exit."""
    pipe = kind()
    try:
        yield pipe
    finally:
        pipe.close()
