"""`ask`: have another process answer a request."""

import os
import pickle
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Generic, TypeVar

from assay.errors import MachineError, UsageError
from assay.files import DiskError
from assay.progress import Progress
from assay.runs.errors import ProcessError
from assay.runs.processes.answering import SAME_HASHES, Question, Reply
from assay.runs.processes.groups import started_group
from assay.runs.processes.pipes import Pipe, opened
from assay.runs.processes.remote_function import RemoteFunction
from assay.runs.progress.wire import WireReader
from assay.watchdog import GRACE_SECONDS

Request = TypeVar("Request")
Result = TypeVar("Result")

# Longer lines are cut, so that output without a newline cannot fill this process's memory.
_LONGEST_LINE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Answer(Generic[Result]):
    """The result of a process, and the time and memory that it took."""

    result: Result
    peak_rss_bytes: int
    wall_seconds: float


def ask(
    function: RemoteFunction[Request, Result],
    request: Request,
    folder: Path,
    *,
    name: str,
    progress: Progress,
    environment: Mapping[str, str] | None = None,
    preload: Sequence[str] = (),
) -> Answer[Result]:
    """Have a new process call `function` with `request`, and wait for its answer.

    `NAME.log` in `folder` holds the output of the process and its children. `progress` shows its tasks
    within one called `name`, and names the log if there is output.

    The process and its children end with this call, even on Ctrl-C, an exception or a kill of this
    process. They get SIGTERM (a KeyboardInterrupt in `function`), and SIGKILL a few seconds later.

    Args:
        function: what the process calls.
        request: a picklable value.
        folder: an existing folder.
        name: of the process in messages and the name of its log, such as "candidate".
        progress: the display of its progress.
        environment: variables to set on top of this process's own.
        preload: slow modules, which the fork server imports once for all processes.

    Raises: UsageError or MachineError that `function` raised; ProcessError with the end of the log if
        there is no answer; DiskError if the folder cannot be written.
    """
    log_file = folder / f"{name}.log"
    try:
        log = log_file.open("wb", buffering=0)
    except OSError as error:
        raise DiskError.refused(log_file, error) from error
    question = Question(
        function,
        pickle.dumps(request),
        {**os.environ, **SAME_HASHES, **(environment or {})},
        str(Path.cwd()),
    )
    started = time.monotonic()
    # Files without a name: nothing is left of them if everything is killed.
    with log, progress.step(name), TemporaryFile() as asked, TemporaryFile() as replied:
        pickle.dump(question, asked)
        asked.seek(0)
        exit_code = _run((asked.fileno(), replied.fileno()), preload, log, name, progress)
        replied.seek(0)
        reply = _read_reply(replied, name, exit_code, log_file)
    if exit_code:
        # Some drivers crash when a process ends, after its answer.
        progress.note(f"{name}: ended with exit code {exit_code} after it had answered")
    result: Result = pickle.loads(reply.result)  # noqa: S301 - written by the child
    return Answer(result, reply.peak_rss_bytes, time.monotonic() - started)


def _run(
    files: tuple[int, int], preload: Sequence[str], log: IO[bytes], name: str, progress: Progress
) -> int:
    """Run `answer` on two descriptors in a new process. Returns: its exit code."""
    body = ("assay.runs.processes.answering:answer", ())
    with opened(Pipe) as output, ExitStack() as stack:
        descriptors = (*files, output.writer)
        with started_group(body, 1, preload, descriptors, GRACE_SECONDS) as group:
            output.close_writer()
            listener = threading.Thread(
                target=copy_context().run,  # keeps the enclosing task
                args=(_listen, os.dup(output.reader), log, name, progress),
                daemon=True,
            )
            listener.start()
            stack.callback(listener.join, GRACE_SECONDS)
            return group.wait()


def _listen(output: int, log: IO[bytes], name: str, progress: Progress) -> None:
    is_log_named = False
    reader = WireReader(progress)
    try:
        with os.fdopen(output, "rb") as stream:
            while line := stream.readline(_LONGEST_LINE_BYTES):
                if not (text := reader.read_line(line.decode(errors="replace").rstrip("\r\n"))):
                    continue
                with suppress(OSError):  # a full disk must not block the process that prints
                    log.write(text.encode() + b"\n")
                if not is_log_named:
                    is_log_named = True
                    progress.note(f"{name}: prints to {log.name}")
    except ValueError:  # the log is closed; a process that left the group holds the pipe open
        pass
    finally:
        reader.close()


def _read_reply(file: IO[bytes], name: str, exit_code: int, log: Path) -> Reply:
    try:
        reply: Reply = pickle.load(file)  # noqa: S301 - written by the child
    except (EOFError, pickle.UnpicklingError):
        raise ProcessError.died(name, exit_code, log) from None
    if reply.error is not None:
        raise (UsageError if reply.is_usage else MachineError)(reply.error)
    return reply
