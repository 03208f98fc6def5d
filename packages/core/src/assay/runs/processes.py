"""Work in a separate process, which isolates what it patches, allocates or breaks."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from assay.errors import MachineError, UsageError
from assay.files import DiskError, UnreadableFileError, read_json_object, write_whole
from assay.progress import Progress
from assay.runs.errors import ProcessError
from assay.runs.progress.wire import WireReader
from assay.runs.worker import SAME_HASHES
from assay.watchdog import GRACE_SECONDS, watched

if TYPE_CHECKING:
    from assay.runs.forking import ForkedProcess

    _Process = subprocess.Popen[bytes] | ForkedProcess

# Longer lines are cut, so that output without a newline cannot fill this process's memory.
_LONGEST_LINE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a process, and the time and memory that it took."""

    result: dict[str, Any]
    peak_rss_bytes: int
    wall_seconds: float


def run_process(
    module: str,
    request: Mapping[str, Any],
    folder: Path,
    *,
    name: str,
    progress: Progress,
    environment: Mapping[str, str] | None = None,
    preload: Sequence[str] = (),
) -> Answer:
    """Run `python -m module`, which calls `assay.runs.worker.serve`, and wait for its answer.

    Writes NAME.request.json, NAME.answer.json and NAME.log into `folder`. The log holds the output of
    the process and its children. `progress` shows its tasks within one called `name`, and names the
    log if there is output.

    The process and its children end with this call, even on Ctrl-C, an exception or a kill of this
    process. They get SIGTERM (a KeyboardInterrupt in `work`), and SIGKILL a few seconds later.

    Args:
        module: an importable module.
        request: JSON values.
        folder: an existing folder.
        name: of the process in messages and file names, such as "candidate".
        progress: the display of its progress.
        environment: variables to set on top of this process's own.
        preload: slow modules. If given, the process is forked from a server that has imported them
            and that later calls share.

    Raises: UsageError or MachineError that `work` raised; ProcessError with the end of the log if
        there is no answer; DiskError if the folder cannot be written.
    """
    answer_file = folder / f"{name}.answer.json"
    log_file = folder / f"{name}.log"
    envelope = {"request": request, "answer": str(answer_file.resolve()), "parent": os.getpid()}
    request_file = write_whole(folder / f"{name}.request.json", json.dumps(envelope, indent=1))
    try:
        answer_file.unlink(missing_ok=True)
        log = log_file.open("wb", buffering=0)
    except OSError as error:
        raise DiskError.refused(log_file, error) from error
    started = time.monotonic()
    with log, progress.step(name):
        process = _start(module, request_file, environment or {}, preload)
        listener = threading.Thread(
            target=copy_context().run,  # keeps the enclosing task
            args=(_listen, process, log, name, progress),
            daemon=True,
        )
        listener.start()
        with watched("group", process.pid):
            try:
                exit_code = process.wait()
            finally:
                end_group(process)
                listener.join(GRACE_SECONDS)
    answer = _read_answer(answer_file, name, exit_code, log_file, time.monotonic() - started)
    if exit_code:
        # Some drivers crash when a process ends, after its answer.
        progress.note(f"{name}: ended with exit code {exit_code} after it had answered")
    return answer


def _start(
    module: str, request_file: Path, environment: Mapping[str, str], preload: Sequence[str]
) -> "_Process":
    if preload:
        from assay.runs.forking import start_forked

        return start_forked(module, str(request_file.resolve()), environment, preload)
    return subprocess.Popen(
        # -P: files in the working directory must not shadow our modules.
        [sys.executable, "-P", "-m", module, str(request_file.resolve())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **SAME_HASHES, **environment},
        process_group=0,
    )


def _listen(process: "_Process", log: IO[bytes], name: str, progress: Progress) -> None:
    is_log_named = False
    reader = WireReader(progress)
    stream = cast("IO[bytes]", process.stdout)
    try:
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
        stream.close()


def end_group(process: "_Process") -> None:
    """End the leader of a process group, if it still runs, and all of its children."""
    try:
        if process.poll() is None:
            signal_group(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
    finally:
        signal_group(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def signal_group(group: int, number: signal.Signals) -> None:
    """Send a signal to a process group, if it exists."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _read_answer(file: Path, name: str, exit_code: int, log: Path, seconds: float) -> Answer:
    try:
        answer = read_json_object(file)
    except UnreadableFileError:
        raise ProcessError.died(name, exit_code, log) from None
    if "error" in answer:
        raise (UsageError if answer["usage"] else MachineError)(answer["error"])
    return Answer(answer["result"], answer["peak_rss_bytes"], seconds)
