"""Work in a process of its own: what it patches, allocates or breaks stays there."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from assay.errors import MachineError, UsageError
from assay.runs.errors import DiskError, ProcessError
from assay.runs.folders import write_whole
from assay.runs.progress import Progress, WireReader
from assay.runs.worker import GRACE_SECONDS

if TYPE_CHECKING:
    from assay.runs.forking import ForkedProcess

    _Process = subprocess.Popen[bytes] | ForkedProcess

# Longer lines are cut: a process that writes no newline must not fill the memory of its parent.
_LONGEST_LINE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Answer:
    """What a process found, and what it took."""

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

    In `folder` it leaves NAME.request.json, NAME.answer.json and NAME.log: all that the process
    and its children wrote to standard output and standard error. Its progress and its lines are
    shown on `progress`; nothing goes to this process's standard output.

    The process and its children end with this call, whatever ends it: Ctrl-C, an exception, the
    death of this process. They are asked to end (SIGTERM, a KeyboardInterrupt in `work`) and get
    a few seconds before they are killed.

    Args:
        module: an importable module.
        request: JSON values.
        folder: an existing folder.
        name: what the process is to the user, such as "candidate".
        progress: shows how far the process is.
        environment: variables to set on top of this process's own.
        preload: modules that take long to import. Given, the process is forked from one that
            has imported them and done nothing else; later calls share it.

    Raises: UsageError or MachineError as the process raised it, in its words; ProcessError with
        the end of its log if it died; DiskError if the folder cannot be written.
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
    with log:
        process = _start(module, request_file, environment or {}, preload)
        listener = threading.Thread(
            target=_listen, args=(process, log, name, progress), daemon=True
        )
        listener.start()
        try:
            exit_code = process.wait()
        finally:
            _end_group(process)
            listener.join(GRACE_SECONDS)
    answer = _read_answer(answer_file, name, exit_code, log_file, time.monotonic() - started)
    if exit_code:
        # Drivers crash when they are torn down; the answer was whole before.
        progress.note(f"{name}: ended with exit code {exit_code} after it had answered")
    return answer


def _start(
    module: str, request_file: Path, environment: Mapping[str, str], preload: Sequence[str]
) -> "_Process":
    if preload:
        from assay.runs.forking import start_forked

        return start_forked(module, str(request_file.resolve()), environment, preload)
    return subprocess.Popen(
        # -P: files in the working directory must not stand in for modules of ours.
        [sys.executable, "-P", "-m", module, str(request_file.resolve())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **environment},
        process_group=0,
    )


def _listen(process: "_Process", log: IO[bytes], name: str, progress: Progress) -> None:
    def take_text(text: str) -> None:
        with suppress(OSError):  # a full disk must not stop the process that is heard
            log.write(text.encode() + b"\n")
        # Of a bar that another library redraws in one line, the last state.
        progress.note(f"{name}: {text.rpartition(chr(13))[2]}")

    reader = WireReader(progress, take_text)
    stream = cast("IO[bytes]", process.stdout)
    try:
        while line := stream.readline(_LONGEST_LINE_BYTES):
            reader.read_line(line.decode(errors="replace").rstrip("\r\n"))
    except ValueError:  # the log is closed: a process that left the group still holds the pipe
        pass
    finally:
        reader.close()
        stream.close()


def _end_group(process: "_Process") -> None:
    """End the process if it still runs, and every child that it left behind."""
    try:
        if process.poll() is None:
            _signal_group(process, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
    finally:
        _signal_group(process, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def _signal_group(process: "_Process", number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _read_answer(file: Path, name: str, exit_code: int, log: Path, seconds: float) -> Answer:
    try:
        answer = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ProcessError.died(name, exit_code, log) from None
    if "error" in answer:
        raise (UsageError if answer["usage"] else MachineError)(answer["error"])
    return Answer(answer["result"], answer["peak_rss_bytes"], seconds)
