"""How a command ends that has no verdict to show: one message, and an exit code."""

import json
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Literal, NoReturn, Protocol, runtime_checkable

from assay.errors import AssayError, UsageError

_BUG = "this is a bug in assay, and no verdict: please report it with the lines above"

Kind = Literal["usage", "machine", "bug", "interrupted"]


class Terminated(KeyboardInterrupt):
    """SIGTERM, as `timeout` and job schedulers send it: the command cleans up as on Ctrl-C."""


@runtime_checkable
class _WrongUsage(Protocol):
    """The errors of click, which typer has a copy of in some versions."""

    def format_message(self) -> str: ...


@contextmanager
def exceptions_ended() -> Iterator[None]:
    """Turn what the command inside raises into one message and `sys.exit`."""
    try:
        with _terminated_by_signal():
            yield
    except SystemExit as end:
        _end_as_typer(end)
    except (AssayError, KeyboardInterrupt, OSError) as error:
        _end_with(error)
    except Exception:  # noqa: BLE001 - Python would end with 1, which is a verdict
        traceback.print_exc()
        _end("bug", _BUG, 2)


def _end_as_typer(end: SystemExit) -> NoReturn:
    """Look for what typer has turned into an exit code: it is in the context of `end`."""
    cause: BaseException | None = end
    while cause is not None:
        if isinstance(cause, KeyboardInterrupt):
            _end_with(cause)
        if isinstance(cause, _WrongUsage):
            _print_json("usage", cause.format_message())  # its words are on standard error
        if isinstance(cause, OSError):
            # Nobody reads the output any more: typer ends with 1, which is a verdict.
            sys.exit(2)
        cause = cause.__context__
    sys.exit(end.code)


def _end_with(error: BaseException) -> NoReturn:
    match error:
        case Terminated():
            _end("interrupted", f"ended by SIGTERM{_files_so_far()}", 128 + signal.SIGTERM)
        case KeyboardInterrupt():
            _end("interrupted", f"interrupted{_files_so_far()}", 128 + signal.SIGINT)
        case AssayError():
            kind: Kind = "usage" if isinstance(error, UsageError) else "machine"
            _end(kind, str(error), error.exit_code)
        case OSError(filename=str() | Path() as file):
            _end("machine", f"{file}: {error.strerror}", 2)
        case _:
            traceback.print_exception(error)
            _end("bug", _BUG, 2)


def _end(kind: Kind, message: str, code: int) -> NoReturn:
    print(f"assay: {message}", file=sys.stderr)  # noqa: T201 - the one message
    _print_json(kind, message)
    sys.exit(code)


def _print_json(kind: Kind, message: str) -> None:
    if "--json" in sys.argv[1:]:
        with suppress(OSError):
            print(json.dumps({"error": {"kind": kind, "message": message}}))  # noqa: T201 - as asked


def _files_so_far() -> str:
    """Where the interrupted run wrote files; without an import, which takes time."""
    folders = sys.modules.get("assay.runs.folders")
    begun = folders.begun_folders() if folders is not None else ()
    return f"; files so far in {begun[-1]}" if begun else ""


@contextmanager
def _terminated_by_signal() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one would interrupt the cleaning up
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
