"""Standard output and standard error that escape foreign text."""

import codecs
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from assay.foreign_text import escape_characters, escape_output, one_line

_ERRORS = "assay-escapes"


class GuardedStream(io.TextIOWrapper):
    """A text stream that escapes log commands and characters that its encoding lacks.

    On a terminal it keeps escape sequences, which colors and progress bars need. There, `print_text`
    and `open_console` escape instead.
    After its pipe is closed, as by `assay check ... | head -1`, it drops all text, so that the command
    still reaches its verdict and exit code.
    """

    def write(self, text: str) -> int:
        """Write `text`, escaped unless this is a terminal. Returns: its length."""
        with self._closed_pipe_ignored():
            super().write(text if self.isatty() else escape_output(text))
        return len(text)

    def flush(self) -> None:
        """Flush, and ignore a closed pipe."""
        with self._closed_pipe_ignored():
            super().flush()

    def write_command(self, text: str) -> None:
        """Write a command line of assay for a CI system."""
        with self._closed_pipe_ignored():
            super().write(text + "\n")

    @contextmanager
    def _closed_pipe_ignored(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            # Otherwise the buffer would be flushed again, at the latest when Python ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())


def guard_standard_streams() -> None:
    """Replace standard output and standard error by guarded streams. Keep test streams."""
    codecs.register_error(_ERRORS, _escape_unencodable)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:
            guarded = GuardedStream(
                stream.buffer,
                encoding=stream.encoding,
                errors=_ERRORS,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            stream.detach()  # its finalizer would close the buffer of the guarded stream
            setattr(sys, name, guarded)
            setattr(sys, f"__{name}__", guarded)


def print_text(text: object, *, end: str = "\n") -> None:
    """Print `str(text)` to standard output. JSON stays the same JSON."""
    sys.stdout.write(escape_output(str(text)) + end)
    sys.stdout.flush()


def print_error(text: str) -> None:
    """Print text to standard error."""
    sys.stderr.write(escape_output(text) + "\n")
    sys.stderr.flush()


def print_warning_command(text: str) -> None:
    """Print a warning that GitHub shows with the run.

    Source: GitHub Docs, "Workflow commands for GitHub Actions".
    """
    command = f"::warning::{one_line(text.replace('%', '%25'))}"
    stream = sys.stdout
    if isinstance(stream, GuardedStream):
        stream.write_command(command)
    else:
        stream.write(command + "\n")


def _escape_unencodable(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return escape_characters(error.object[error.start : error.end]), error.end
