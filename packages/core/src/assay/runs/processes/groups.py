"""Groups of processes: a leader that the fork server forks, and the processes that it forks."""

import math
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from assay.errors import MachineError
from assay.runs.processes.fork_server_client import FORK_SERVER
from assay.runs.processes.pipes import LinePipe, Pipe, opened
from assay.watchdog import GRACE_SECONDS, signal_group, watched

Body = tuple[str, Sequence[str]]
"""MODULE:FUNCTION to call in each process, and its first arguments. It also gets the number of the
process and the descriptors of the group, and never returns."""

LEADER_LOST = "the process that leads a group is gone; was the machine cleaned?"

_END_SECONDS = 10.0

_running: set[int] = set()


class ProcessGroup:
    """A running group. id: of its leader and of the process group."""

    def __init__(self, group_id: int, num_processes: int, exits: LinePipe) -> None:
        self.id = group_id
        self.exits = exits
        self.pids: dict[int, int] = {}
        """Process ids by number of the process, once all are forked."""
        self.exit_codes: dict[int, int] = {}
        """Exit codes by number of the process; negative after a signal."""
        self._num_processes = num_processes

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait for all processes. Returns: the exit code of the first; None if `seconds` pass before.

        Raises: MachineError if the leader was killed.
        """
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        while not self._have_ended():
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self.exits.wait(left if seconds is not None else None)
            self.receive()
            if self.is_lost:
                raise MachineError(LEADER_LOST)
        return self.exit_codes[0]

    @property
    def is_lost(self) -> bool:
        """Return True if the leader is gone and can report no further exit."""
        return self.exits.ended and not self._have_ended()

    def receive(self) -> list[int]:
        """Read what the leader reported. Returns: the numbers of processes that ended since."""
        ended = []
        for line in self.exits.read_lines():
            if "pids" in line:
                self.pids = {int(number): pid for number, pid in line["pids"].items()}
            else:
                self.exit_codes[line["number"]] = line["exit"]
                ended.append(line["number"])
        return ended

    def end(self, grace_seconds: float) -> None:
        """End all processes and their children: by SIGTERM, after the grace period by SIGKILL."""
        try:
            if grace_seconds and not self._have_ended():
                signal_group(self.id, signal.SIGTERM)
                deadline = time.monotonic() + grace_seconds
                while not (self._have_ended() or self.is_lost):
                    if (left := deadline - time.monotonic()) <= 0:
                        break
                    self.exits.wait(left)
                    self.receive()
        finally:
            signal_group(self.id, signal.SIGKILL)
            self.exits.read_to_end(time.monotonic() + _END_SECONDS)

    def _have_ended(self) -> bool:
        return len(self.exit_codes) == self._num_processes


@contextmanager
def started_group(
    body: Body,
    num_processes: int,
    preload: Sequence[str],
    descriptors: Sequence[int],
    grace_seconds: float = 0.0,
) -> Iterator[ProcessGroup]:
    """Start processes that call `body`, and end them on exit. They end if this process is killed.

    preload: modules that the fork server imports first, once for all groups.
    descriptors: for `body`; this process may close its own afterwards.
    grace_seconds: between SIGTERM and SIGKILL if the processes still run on exit; 0 for SIGKILL only.
    Raises: ForkServerError if a module cannot be imported.
    """
    # The leader ends the group when `parent` is closed, which also happens if this process dies.
    with opened(Pipe) as parent, opened(LinePipe) as exits:
        group_id = FORK_SERVER.start_leader(
            body, num_processes, preload, (parent.reader, exits.writer, *descriptors)
        )
        parent.close_reader()
        exits.close_writer()
        group = ProcessGroup(group_id, num_processes, exits)
        _running.add(group_id)
        try:
            with watched("group", group_id):
                try:
                    yield group
                finally:
                    group.end(grace_seconds)
        finally:
            _running.discard(group_id)


def interrupt_all() -> None:
    """Send SIGTERM to all groups that this process started and still waits for."""
    for group_id in tuple(_running):
        signal_group(group_id, signal.SIGTERM)


def end_command(process: "subprocess.Popen[bytes]") -> None:
    """End a command that leads its process group, if it still runs, and all of its children."""
    try:
        if process.poll() is None:
            signal_group(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
    finally:
        signal_group(process.pid, signal.SIGKILL)
        process.wait()
