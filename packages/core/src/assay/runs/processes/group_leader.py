"""The first process of a group: forks the others and reports their exit codes."""

import json
import os
import pkgutil
import select
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from assay.watchdog import GRACE_SECONDS

# Makes a rank of a world write its stack.
STACK_SIGNAL = signal.SIGUSR1

_POLL_SECONDS = 0.02


def lead(
    body: str, arguments: Sequence[str], num_processes: int, parent: int, exits: int, *more: int
) -> NoReturn:
    """Fork the processes; write a line to `exits` for each that ends; end with the parent.

    It never ends by itself, so that the system cannot reuse the group's number before the parent
    kills the group.

    body: MODULE:FUNCTION, which each process calls with `arguments`, its number and `more`.
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
            pkgutil.resolve_name(body)(*arguments, number, *more)
        running[pid] = number
    for descriptor in more:
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
