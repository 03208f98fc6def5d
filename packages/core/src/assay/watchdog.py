"""Ends the processes and removes the folders that a killed process leaves behind.

A process that is killed cannot clean up, and a child that holds the interpreter's lock, in a
vendor's call or a regular expression, cannot see that its parent is gone. A third process can: the
watchdog, of which each process that watches anything has one. It is this file, run without any
package: small, quick to start, and without code that could hang.
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
# The parent's end also closes the pipe, but not where a fork of the parent holds it open.
_PARENT_SECONDS = 1.0
_POLL_SECONDS = 0.02
_OWN_END_SECONDS = 1.0

# group: a process group, by its number; process: one process; folder: by its path.
Kind = Literal["group", "process", "folder"]
_Watched = tuple[Kind, int | str]


class Watchdog:
    """This process's side: what its watchdog is to end and remove if this process is killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._watched: dict[_Watched, None] = {}

    def start_anew(self) -> None:
        """Forget all; called in a fork, where neither watchdog nor lock are those of this process."""
        process = self._process
        self.__init__()  # type: ignore[misc]
        if process is not None:
            process.returncode = 0  # its parent waits for it
            with suppress(OSError):
                process.stdin.close()  # type: ignore[union-attr] # a pipe

    @property
    def pid(self) -> int | None:
        """Process id of the watchdog; None before anything was watched."""
        return self._process.pid if self._process else None

    def watch(self, kind: Kind, of: int | str) -> None:
        """End or remove it if this process is killed. The first call starts the watchdog."""
        with self._lock:
            self._watched[kind, of] = None
            self._send({"watch": kind, "of": of})

    def start(self) -> None:
        """Start the watchdog, if it does not run: with the variables of now."""
        with self._lock:
            if self._process is None:
                self._start()

    def forget(self, kind: Kind, of: int | str) -> None:
        """The opposite of `watch`; called when it has ended or was removed."""
        with self._lock:
            if self._watched.pop((kind, of), self) is None:
                self._send({"forget": kind, "of": of})

    def _send(self, line: dict[str, Any]) -> None:
        if self._process is not None:
            with suppress(OSError):  # somebody killed it
                _write_line(self._process, line)
                return
            self._close()
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            # -I -S: neither variables nor installed packages can change or delay it.
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            process_group=0,  # what is sent to the group of this process must not end it
        )
        for kind, of in self._watched:
            _write_line(self._process, {"watch": kind, "of": of})

    def close(self) -> None:
        """End the watchdog, which ends processes that still run; called when this process ends."""
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
os.register_at_fork(after_in_child=WATCHDOG.start_anew)


@contextmanager
def watched(kind: Kind, of: int | str) -> Iterator[None]:
    """Inside, the watchdog ends or removes it if this process is killed."""
    WATCHDOG.watch(kind, of)
    try:
        yield
    finally:
        WATCHDOG.forget(kind, of)


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A new folder, removed on exit, or by the watchdog if this process is killed."""
    with TemporaryDirectory(prefix=prefix) as made, watched("folder", made):
        yield Path(made)


def _serve() -> None:
    """Read lines of `Watchdog` until its process is gone, then end and remove what is left."""
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
    # Last the single processes, such as a fork server, which reap the ended ones.
    ended = groups + [int(of) for kind, of in left if kind == "process"]
    _signal_all(ended, signal.SIGKILL)
    if folders := [Path(str(of)) for kind, of in left if kind == "folder"]:
        _wait_for(ended, _OWN_END_SECONDS)  # what still runs may write to them
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _signal_all(targets: list[int], number: int) -> None:
    """Send a signal to each process, and to each process group, whose number is negative."""
    for target in targets:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(target, number)


def _wait_for(targets: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(map(_exists, targets)) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _exists(target: int) -> bool:
    try:
        os.kill(target, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


if __name__ == "__main__":
    _serve()
