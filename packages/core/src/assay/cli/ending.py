"""End a command: with a verdict and its exit code, or with one message."""

import errno
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import distributions
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal, NoReturn, Protocol, runtime_checkable

from assay.errors import AssayError, MachineError, UsageError
from assay.output.streams import guard_standard_streams, print_error, print_text

if TYPE_CHECKING:
    from assay.api.verdict import CheckedVerdict

_BUG = "this is a bug in assay, and no verdict: please report it with the lines above"

# A longer import hangs. Torch takes a second or two, on a busy machine tens of seconds.
_IMPORT_SECONDS = 30.0
_AGAIN_SECONDS = 0.05

# The packages of modules with another name.
_PACKAGES = {"ruamel": "ruamel_yaml", "yaml": "pyyaml"}
# Error numbers of a full disk and a lost terminal.
_OUTPUT_REFUSED = (errno.ENOSPC, errno.EIO, errno.EDQUOT)

Kind = Literal["usage", "machine", "bug", "interrupted"]


class Terminated(KeyboardInterrupt):
    """SIGTERM, from `timeout` or a job scheduler; the command cleans up as on Ctrl-C."""


@runtime_checkable
class WrongUsage(Protocol):
    """The errors of click, or of the copy that some versions of typer have."""

    def format_message(self) -> str:
        """Return the message for the user."""


def finish(folder: Path, *, as_json: bool) -> NoReturn:
    """Write the page of the run in `folder`, show it, and exit with its verdict's code."""
    from assay.api.verdict import CheckedVerdict

    end_with(CheckedVerdict.publish(folder), as_json=as_json)


def end_with(verdict: "CheckedVerdict", *, as_json: bool) -> NoReturn:
    """Print `verdict` and exit with its code; under torchrun only rank 0 prints."""
    import typer  # slow

    from assay.launch import is_first_rank

    if not is_first_rank():
        raise typer.Exit
    show_verdict(verdict, as_json=as_json)
    raise typer.Exit(verdict.verdict.exit_code)


def show_verdict(verdict: "CheckedVerdict", *, as_json: bool = False) -> None:
    """Print `verdict`. Exit only if its page could not be written."""
    import typer  # slow

    from assay.output.console import open_console
    from assay.runs.results import format_verdict

    verdict.print_to(open_console(sys.stderr if as_json else None))
    if as_json:
        print_text(format_verdict(verdict), end="")
    if verdict.unwritten:
        print_error(f"assay: {verdict.unwritten}")
        raise typer.Exit(MachineError.exit_code)


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Convert exceptions inside the context to one message and `sys.exit`."""
    guard_standard_streams()
    try:
        with _signals_raise():
            yield
            sys.stdout.flush()
    except SystemExit as end:
        _end_as_typer(end)
    except (AssayError, KeyboardInterrupt, OSError, ModuleNotFoundError, RuntimeError) as error:
        _end_with(error)
    except Exception:  # noqa: BLE001 - Python would exit with 1, a verdict
        traceback.print_exc()
        _end("bug", _BUG, 2)


def _end_as_typer(end: SystemExit) -> NoReturn:
    """Find the exception that typer has converted to `end`, in its context."""
    cause: BaseException | None = end
    while cause is not None:
        if isinstance(cause, KeyboardInterrupt | EOFError):  # typer would exit with 1, a verdict
            _end_with(cause)
        if isinstance(cause, WrongUsage):
            _print_json("usage", cause.format_message())  # typer has printed it
        if isinstance(cause, OSError):
            # The output is closed: typer would exit with 1, a verdict.
            _end_without_output()
        cause = cause.__context__
    try:
        sys.stdout.flush()
    except OSError as error:
        _end_with(error)
    sys.exit(end.code)


def _end_with(error: BaseException) -> NoReturn:
    match error:
        case Terminated():
            _end("interrupted", f"ended by SIGTERM{_files_so_far()}", 128 + signal.SIGTERM)
        case KeyboardInterrupt():
            _end("interrupted", f"interrupted{_files_so_far()}", 128 + signal.SIGINT)
        case AssayError():
            kind: Kind = "usage" if isinstance(error, UsageError) else "machine"
            folders = sys.modules.get("assay.runs.folders")
            if folders is not None and isinstance(error, UsageError):
                folders.remove_refused(error)
            _end(kind, str(error), error.exit_code)
        case OSError(filename=str() | Path() as file):
            _end("machine", f"{file}: {error.strerror}", 2)
        case ModuleNotFoundError(name=str() as module) if wanted := _find_requirements(module):
            names = " and ".join([module, *(_name_of(one) for one in wanted[1:])])
            words = " ".join(f"'{one}'" for one in wanted)
            fix = (
                f"install {'them' if wanted[1:] else 'it'}: {sys.executable} -m pip install {words}"
            )
            _end("machine", f"assay needs {names}, which this Python does not have; {fix}", 2)
        case RuntimeError() if "TORCH_DEVICE_BACKEND_AUTOLOAD" in str(error):
            _end("machine", f"torch: {error} Its cause: {error.__cause__}", 2)
        case OSError(errno=number) if number in _OUTPUT_REFUSED:
            _end_without_output(f"standard output cannot be written: {error.strerror}")
        case _:
            traceback.print_exception(error)
            _end("bug", _BUG, 2)


def _find_requirements(module: str) -> list[str]:
    """Find the requirement of our packages that provides a missing module, and others of it that are missing.

    Returns: the module's own first; an empty list without requirements.
    """
    for package in (one for one in distributions() if one.name.startswith("assay-")):
        lines = package.requires or []
        for line in lines:
            wanted = line.partition(";")[0].strip()
            if re.sub(r"[.-]", "_", _name_of(wanted)) == _PACKAGES.get(module, module):
                always = (one for one in lines if ";" not in one and one != wanted)
                return [wanted, *(one for one in always if not _is_installed(_name_of(one)))]
    return []


def _name_of(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0]


def _is_installed(name: str) -> bool:
    return next(iter(distributions(name=name)), None) is not None


def _end(kind: Kind, message: str, code: int) -> NoReturn:
    with suppress(OSError):
        print_error(f"assay: {message}")
    _print_json(kind, message)
    sys.exit(code)


def _end_without_output(message: str = "") -> NoReturn:
    """Exit with 2 without flushing the rest of standard output."""
    if message:
        with suppress(OSError):
            print_error(f"assay: {message}")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(2)


def _print_json(kind: Kind, message: str) -> None:
    if "--json" in sys.argv[1:]:
        with suppress(OSError):
            print_text(json.dumps({"error": {"kind": kind, "message": message}}))


def _files_so_far() -> str:
    """Name the folder of the interrupted run, without a slow import."""
    folders = sys.modules.get("assay.runs.folders")
    begun = folders.begun_folders() if folders is not None else ()
    return f"; files so far in {begun[-1]}" if begun else ""


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Make Ctrl-C and SIGTERM raise inside the context, but not during an import."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    errors: dict[signal.Signals, type[KeyboardInterrupt]] = {signal.SIGTERM: Terminated}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored
        errors[signal.SIGINT] = KeyboardInterrupt
    before = {number: signal.signal(number, _Raise(error)) for number, error in errors.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Raise:
    """A signal handler that raises `error`.

    An exception during the import of torch aborts the process in C++. So the signal is sent again a
    moment later, unless the import hangs.
    """

    def __init__(self, error: type[KeyboardInterrupt]) -> None:
        self._error = error
        self._first: float | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._first = self._first or time.monotonic()
        if _is_importing(frame) and time.monotonic() - self._first < _IMPORT_SECONDS:
            again = threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
            return
        if self._error is Terminated:
            signal.signal(number, signal.SIG_IGN)  # a second one would interrupt the cleanup
        raise self._error


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
