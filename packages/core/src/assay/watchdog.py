"""A process that ends the processes and removes the folders that a killed process leaves behind.

A killed process cannot clean up. A child that holds the interpreter's lock, in a vendor's call or a
regular expression, does not notice that its parent is gone. Each process that needs it starts one
watchdog: this file, run without any package, so that it starts quickly and cannot hang.
"""

import atexit
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

# Time between SIGTERM and SIGKILL, in which a process can flush its files.
GRACE_SECONDS = 5.0
# The pipe closes when the parent ends, unless a fork of the parent holds it open.
_PARENT_SECONDS = 1.0
_POLL_SECONDS = 0.02
_OWN_END_SECONDS = 1.0

# group: a process group, by its number; process: one process; folder: by its path.
Kind = Literal["group", "process", "folder"]
_Watched = tuple[Kind, int | str]


class Watchdog:
    """The processes and folders that the watchdog of this process cleans up if it is killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._watched: dict[_Watched, None] = {}

    def reset_in_fork(self) -> None:
        """Forget all: watchdog and lock belong to the parent of the fork."""
        process = self._process
        self.__init__()  # type: ignore[misc]
        if process is not None:
            process.returncode = 0  # its parent waits for it
            with suppress(OSError):
                process.stdin.close()  # type: ignore[union-attr] # a pipe

    @property
    def pid(self) -> int | None:
        """Return the process id of the watchdog; None before its start."""
        return self._process.pid if self._process else None

    def watch(self, kind: Kind, of: int | str) -> None:
        """Clean up `of` if this process is killed. The first call starts the watchdog."""
        with self._lock:
            self._watched[kind, of] = None
            self._send({"watch": kind, "of": of})

    def start(self) -> None:
        """Start the watchdog, unless it runs, with the current environment variables."""
        with self._lock:
            if self._process is None:
                self._start()

    def forget(self, kind: Kind, of: int | str) -> None:
        """Stop watching a process that ended, or a folder that was removed."""
        with self._lock:
            if self._watched.pop((kind, of), self) is None:
                self._send({"forget": kind, "of": of})

    def _send(self, line: dict[str, Any]) -> None:
        if self._process is not None:
            with suppress(OSError):  # it was killed
                _write_line(self._process, line)
                return
            self._close()
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            # -I -S: environment variables and installed packages can neither change nor delay it.
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            process_group=0,  # a signal to the group of this process must not end it
        )
        for kind, of in self._watched:
            _write_line(self._process, {"watch": kind, "of": of})

    def close(self) -> None:
        """End the watchdog, which ends the processes that still run. Called at exit."""
        with self._lock:
            for kind, of in self._watched:
                if self._process is not None and kind == "folder":  # its owner removes it
                    with suppress(OSError):
                        _write_line(self._process, {"forget": kind, "of": of})
            self._close()

    def _close(self) -> None:
        if self._process is None:
            return
        with suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr] # a pipe
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_OWN_END_SECONDS)
        self._process = None


def _write_line(process: "subprocess.Popen[bytes]", line: dict[str, Any]) -> None:
    os.write(process.stdin.fileno(), json.dumps(line).encode() + b"\n")  # type: ignore[union-attr] # a pipe


WATCHDOG = Watchdog()
atexit.register(WATCHDOG.close)
os.register_at_fork(after_in_child=WATCHDOG.reset_in_fork)


@contextmanager
def watched(kind: Kind, of: int | str) -> Iterator[None]:
    """Watch a process, group or folder within the context."""
    WATCHDOG.watch(kind, of)
    try:
        yield
    finally:
        WATCHDOG.forget(kind, of)


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Make a folder, removed on exit, or by the watchdog if this process is killed."""
    with TemporaryDirectory(prefix=prefix) as made, watched("folder", made):
        yield Path(made)


def signal_group(group_id: int, number: signal.Signals) -> None:
    """Send a signal to a process group, if it exists."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group_id, number)


def _serve() -> None:
    """Read lines of `Watchdog` until its process is gone, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent = os.getppid()
    watched: dict[_Watched, None] = {}
    partial = b""
    while os.getppid() == parent:
        if not select.select([0], [], [], _PARENT_SECONDS)[0]:
            continue
        chunk = os.read(0, 1 << 16)
        if not chunk:
            break
        *lines, partial = (partial + chunk).split(b"\n")
        for line in map(json.loads, lines):
            if "watch" in line:
                watched[line["watch"], line["of"]] = None
            else:
                watched.pop((line["forget"], line["of"]), None)
    _clean_up(list(watched))


def _clean_up(left: list[_Watched]) -> None:
    groups = [-int(of) for kind, of in left if kind == "group"]
    _signal_all(groups, signal.SIGTERM)
    _wait_for(groups, GRACE_SECONDS)
    # Single processes are last: one such as a fork server reaps those that ended.
    ended = groups + [int(of) for kind, of in left if kind == "process"]
    _signal_all(ended, signal.SIGKILL)
    if folders := [Path(str(of)) for kind, of in left if kind == "folder"]:
        _wait_for(ended, _OWN_END_SECONDS)  # a running process may write to them
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _signal_all(ids: list[int], number: int) -> None:
    """Send a signal to processes, and to process groups, which have negative numbers."""
    for process_id in ids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process_id, number)


def _wait_for(ids: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(map(_exists, ids)) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _exists(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


if __name__ == "__main__":
    _serve()
