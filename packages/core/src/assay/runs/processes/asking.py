"""`ask`: have another process answer a request."""

import io
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar, copy_context
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, TypeVar

from assay.errors import MachineError, UsageError
from assay.files import DiskError
from assay.progress import Progress, format_size
from assay.runs.errors import ProcessError
from assay.runs.processes.answering import SAME_HASHES, Question, Reply
from assay.runs.processes.group_leader import STACK_SIGNAL
from assay.runs.processes.groups import started_group
from assay.runs.processes.pipes import Pipe, opened
from assay.runs.processes.remote_function import RemoteFunction
from assay.runs.progress.wire import WireReader
from assay.watchdog import GRACE_SECONDS

Request = TypeVar("Request")
Result = TypeVar("Result")

# Longer lines are cut, so that output without a newline cannot fill this process's memory.
_LONGEST_LINE_BYTES = 1 << 16

# Of more output a log holds the begin, and the last lines.
LARGEST_LOG_BYTES = 16 << 20
_LAST_LINES = 100

# A process writes its stack in milliseconds, unless it is stopped or blocked in a driver.
_STACK_SECONDS = 2.0

_LIMIT: ContextVar[tuple[float, float] | None] = ContextVar("assay_time_limit", default=None)


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Let the processes that are asked inside the context take `seconds` together; None for any time."""
    limit = None if seconds is None else (seconds, time.monotonic() + seconds)
    token = _LIMIT.set(limit)
    try:
        yield
    finally:
        _LIMIT.reset(token)


def seconds_left() -> float | None:
    """Return the time that the innermost `time_limit` leaves; None without one."""
    limit = _LIMIT.get()
    return None if limit is None else max(0.0, limit[1] - time.monotonic())


def ask(
    function: RemoteFunction[Request, Result],
    request: Request,
    folder: Path,
    *,
    name: str,
    progress: Progress,
    environment: Mapping[str, str] | None = None,
) -> Result:
    """Have a new process call `function` with `request`, and return its result.

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
    # Files without a name: nothing is left of them if everything is killed.
    with log, progress.step(name), TemporaryFile() as asked, TemporaryFile() as replied:
        pickle.dump(question, asked)
        asked.seek(0)
        exit_code = _run((asked.fileno(), replied.fileno()), function.preload, log, name, progress)
        replied.seek(0)
        reply = _read_reply(replied, name, exit_code, log_file)
        result: Result = _read_pickle(io.BytesIO(reply.result), name, exit_code, log_file)
    if exit_code:
        # Some drivers crash when a process ends, after its answer.
        progress.note(f"{name}: ended with exit code {exit_code} after it had answered")
    return result


def _run(
    files: tuple[int, int], preload: Sequence[str], log: IO[bytes], name: str, progress: Progress
) -> int:
    """Run `answer` on two descriptors in a new process. Returns: its exit code."""
    body = ("assay.runs.processes.answering:answer", ())
    reader = WireReader(progress)
    with opened(Pipe) as output, ExitStack() as stack:
        descriptors = (*files, output.writer)
        with started_group(body, 1, preload, descriptors, GRACE_SECONDS) as group:
            output.close_writer()
            listener = threading.Thread(
                target=copy_context().run,  # keeps the enclosing task
                args=(_listen, os.dup(output.reader), log, name, progress, reader),
                daemon=True,
            )
            listener.start()
            stack.callback(listener.join, GRACE_SECONDS)
            exit_code = group.wait(seconds_left())
            if exit_code is None:
                with suppress(OSError, KeyError):
                    os.kill(group.pids[0], STACK_SIGNAL)
                listener.join(_STACK_SECONDS)
                limit = (_LIMIT.get() or (0.0,))[0]
                raise ProcessError.hung(name, limit, reader.open_tasks, Path(log.name))
            return exit_code


def _listen(output: int, log: IO[bytes], name: str, progress: Progress, reader: WireReader) -> None:
    is_log_named = False
    room, last = LARGEST_LOG_BYTES, deque[bytes](maxlen=_LAST_LINES)
    try:
        with os.fdopen(output, "rb") as stream:
            while line := stream.readline(_LONGEST_LINE_BYTES):
                if not (text := reader.read_line(line.decode(errors="replace").rstrip("\r\n"))):
                    continue
                room -= len(data := text.encode() + b"\n")
                if room < 0:
                    last.append(data)
                    continue
                with suppress(OSError):  # a full disk must not block the process that prints
                    log.write(data)
                if not is_log_named:
                    is_log_named = True
                    progress.note(f"{name}: prints to {log.name}")
    except ValueError:  # the log is closed; a process that left the group holds the pipe open
        pass
    finally:
        reader.close()
        if last:
            cut = f"output is cut after {format_size(LARGEST_LOG_BYTES)}"
            progress.note(f"{name}: {cut}: {log.name}")
            with suppress(OSError, ValueError):
                log.write(f"[assay: {cut}; the last {len(last)} lines follow]\n".encode())
                log.write(b"".join(last))


def _read_reply(file: IO[bytes], name: str, exit_code: int, log: Path) -> Reply:
    reply = _read_pickle(file, name, exit_code, log)
    if not isinstance(reply, Reply):
        raise ProcessError.died(name, exit_code, log)
    if reply.error is not None:
        raise (UsageError if reply.is_usage else MachineError)(reply.error)
    return reply


def _read_pickle(file: IO[bytes], name: str, exit_code: int, log: Path) -> Any:  # noqa: ANN401 - any value
    try:
        return pickle.load(file)  # noqa: S301 - written by the child
    except Exception:  # noqa: BLE001 - code of the candidate may have written anything
        raise ProcessError.died(name, exit_code, log) from None
