"""The fork server: a process that imports torch and other slow modules once.

It starts no thread and opens no device, because a fork inherits neither in a usable state. For each
request it forks the leader of a group of processes, and answers with the leader's pid. A request
without a folder only imports modules.
"""

import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from assay.launch.child_process import STACK_SIGNAL, answer
from assay.watchdog import GRACE_SECONDS

ANSWER = struct.Struct("=q")
MAX_REQUEST_BYTES = 1 << 16
MAX_DESCRIPTORS = 4  # those of `lead`

_POLL_SECONDS = 0.02


def serve(connection: socket.socket) -> NoReturn:
    """Fork a leader for each request until the other end of `connection` is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # leaders are reaped by the system
    gc.disable()  # saves a fifth of the time of imports
    while True:
        with suppress(ConnectionResetError):
            data, descriptors, _, _ = socket.recv_fds(
                connection, MAX_REQUEST_BYTES, MAX_DESCRIPTORS
            )
            if data:
                _answer(connection, json.loads(data), descriptors)
                continue
        os._exit(0)


def _answer(connection: socket.socket, request: dict[str, Any], descriptors: list[int]) -> None:
    try:
        _import(request)
        pid = _fork_leader(connection, request, descriptors) if "folder" in request else 0
        connection.sendall(ANSWER.pack(pid))
    except Exception:  # noqa: BLE001 - sent to the parent
        text = traceback.format_exc().encode()
        connection.sendall(ANSWER.pack(-len(text)) + text)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _fork_leader(connection: socket.socket, request: dict[str, Any], descriptors: list[int]) -> int:
    pid = os.fork()
    if not pid:
        connection.close()
        gc.enable()
        lead(request["folder"], request["num_processes"], *descriptors)
    with suppress(OSError):  # the leader does the same
        os.setpgid(pid, pid)
    return pid


def _import(request: dict[str, Any]) -> None:
    if request["sys_path"] is not None:
        sys.path[:] = request["sys_path"]
    before = len(sys.modules)
    for module in request["preload"]:
        importlib.import_module(module)
    if len(sys.modules) > before:
        # Imported objects are never freed; visiting them would only unshare their pages.
        gc.freeze()


def lead(
    folder: str, num_processes: int, parent: int, exits: int, gate: int, reports: int
) -> NoReturn:
    """Fork the processes; write a line to `exits` for each that ends; end with the parent.

    It never ends by itself, so that the system cannot reuse the group's number before the parent
    kills the group.

    folder, gate, reports: of the call that the processes `answer`.
    parent: a pipe whose other end only the parent holds; the group ends when it is closed.
    exits: a pipe that only this process writes, so that end of file shows its death.
    """
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    _become_quiet()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # meant for the processes
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    # A request for a stack stays pending until the rank has installed its handler.
    signal.pthread_sigmask(signal.SIG_BLOCK, {STACK_SIGNAL})
    running: dict[int, int] = {}
    for number in range(num_processes):
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            for default in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(default, signal.SIG_DFL)
            for descriptor in (parent, exits, woken, wake):
                os.close(descriptor)
            answer(folder, number, gate, reports)
        running[pid] = number
    for descriptor in (gate, reports):
        os.close(descriptor)
    _write_line(exits, {"pids": {number: pid for pid, number in running.items()}})
    while True:
        readable, _, _ = select.select([parent, woken], [], [])
        if woken in readable:
            os.read(woken, 1 << 16)
            _report_exits(exits, running)
        if parent in readable:
            _end_all(running)


def _end_all(running: dict[int, int]) -> NoReturn:
    """End the group: by SIGTERM, and by SIGKILL once its processes ended or had time to."""
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while running and time.monotonic() < deadline:
        pid, _ = os.waitpid(-1, os.WNOHANG)
        running.pop(pid, None)
        time.sleep(0 if pid else _POLL_SECONDS)
    os.killpg(0, signal.SIGKILL)
    os._exit(1)  # not reached


def _become_quiet() -> None:
    with Path(os.devnull).open("r+b") as nothing:
        for descriptor in (0, 1, 2):
            os.dup2(nothing.fileno(), descriptor)
    sys.stdout.flush()


def _report_exits(exits: int, running: dict[int, int]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        if pid in running:
            code = os.waitstatus_to_exitcode(status)
            _write_line(exits, {"number": running.pop(pid), "exit": code})


def _write_line(descriptor: int, value: dict[str, Any]) -> None:
    # May exceed one atomic write; only this process writes here.
    data = json.dumps(value).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
