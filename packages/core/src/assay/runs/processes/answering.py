"""The child's half of `ask`: do the work of a request and write the answer."""

import atexit
import faulthandler
import os
import random
import signal
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pickle import dumps, load, loads  # the candidate may replace functions of the module
from types import FrameType
from typing import Any, NoReturn

from assay.errors import AssayError, UsageError
from assay.runs.processes.group_leader import STACK_SIGNAL
from assay.runs.processes.remote_function import RemoteFunction
from assay.runs.progress.wire import WireProgress, write_event

# Equal names have equal hashes in every process, so that all walk a set of names in one order.
# transformers makes one rotary table for each kind of layer in such a set, and calls of a module are
# matched by number.
SAME_HASHES = {"PYTHONHASHSEED": "0"}


@dataclass(frozen=True, slots=True)
class Question:
    """A function, its request, and the surroundings of the process that asks."""

    function: RemoteFunction[Any, Any]
    request: bytes
    """The pickled request."""
    environment: Mapping[str, str]
    working_directory: str


@dataclass(frozen=True, slots=True)
class Reply:
    """The pickled result, or the message of an AssayError."""

    result: bytes = b""
    error: str | None = None
    is_usage: bool = False
    """True if the error is a UsageError."""


def answer(_number: int, question: int, reply: int, output: int) -> NoReturn:
    """Answer the question in a file and end this process, a fork of the fork server.

    question, reply: descriptors of a pickled `Question`, and of an empty file for the `Reply`.
    output: a pipe for everything that is printed, and for progress.
    """
    code = 1
    try:
        _redirect_streams(output)
        signal.signal(signal.SIGTERM, _interrupt)
        faulthandler.register(STACK_SIGNAL, file=2)  # any thread may get the signal
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {STACK_SIGNAL})
        with os.fdopen(question, "rb") as file:
            asked: Question = load(file)  # noqa: S301 - written by the parent
        _restore_surroundings(asked)
        written = dumps(_reply_to(asked))
        with os.fdopen(reply, "wb") as file:
            file.write(written)
        code = 0
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException:  # noqa: BLE001 - must not return to the leader's code
        traceback.print_exc()
    finally:
        try:
            atexit._run_exitfuncs()  # noqa: SLF001 - ends the children of libraries
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _reply_to(asked: Question) -> Reply:
    progress = WireProgress(partial(write_event, os.dup(sys.stderr.fileno())))
    try:
        request = loads(asked.request)  # noqa: S301 - written by the parent
        result = asked.function.load()(request, progress)
    except AssayError as error:
        return Reply(error=str(error), is_usage=isinstance(error, UsageError))
    return Reply(dumps(result))


def _redirect_streams(output: int) -> None:
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)


def _restore_surroundings(asked: Question) -> None:
    os.environ.clear()
    os.environ.update(asked.environment)
    os.chdir(asked.working_directory)
    sys.argv = [asked.function.path]
    reseed()


def reseed() -> None:
    """Draw new seeds for the generators of Python and numpy, whose states all forks share."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _interrupt(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one would interrupt the cleaning up
    raise KeyboardInterrupt
