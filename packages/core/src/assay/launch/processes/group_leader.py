"""The first process of a world's group: forks the ranks and reports their exit codes."""

import json
import os
import select
import shutil
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from assay.launch.processes.rank_process import STACK_SIGNAL, run_rank


def lead(request: dict[str, Any], parent: int, gate: int, exits: int, reports: int) -> NoReturn:
    """Fork the ranks; write a line to `exits` for each that ends; end with the parent.

    It never ends by itself, so that the system cannot reuse the group's number before the parent
    kills the group.

    request: `folder` and `num_ranks` of the world, from `ForkServer.start_leader`.
    parent: a pipe whose other end only the parent holds; the group ends when it is closed.
    gate: a pipe that the parent closes when every rank has returned; ranks wait for that.
    exits: a pipe that only this process writes, so that end of file shows its death.
    reports: a pipe that the ranks write.
    """
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    folder = Path(request["folder"])
    _become_quiet(folder / "leader.log")
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    # A request for a stack stays pending until the rank has installed its handler.
    signal.pthread_sigmask(signal.SIG_BLOCK, {STACK_SIGNAL})
    ranks: dict[int, int] = {}
    for rank in range(request["num_ranks"]):
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in (parent, exits, woken, wake):
                os.close(descriptor)
            run_rank(folder, rank, gate, reports)
        ranks[pid] = rank
    os.close(gate)
    os.close(reports)
    _write_line(exits, {"pids": {rank: pid for pid, rank in ranks.items()}})
    while True:
        readable, _, _ = select.select([parent, woken], [], [])
        if woken in readable:
            os.read(woken, 1 << 16)
            _report_exits(exits, ranks)
        if parent in readable:
            # The parent is dead and cannot remove the folder. Ranks must not write to it meanwhile.
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
            shutil.rmtree(folder, ignore_errors=True)
            os.killpg(0, signal.SIGKILL)


def _become_quiet(log: Path) -> None:
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout.flush()


def _report_exits(exits: int, ranks: dict[int, int]) -> None:
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        if pid in ranks:
            code = os.waitstatus_to_exitcode(status)
            _write_line(exits, {"rank": ranks.pop(pid), "exit": code})


def _write_line(descriptor: int, value: dict[str, Any]) -> None:
    # May exceed one atomic write; only this process writes here.
    data = json.dumps(value).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]
