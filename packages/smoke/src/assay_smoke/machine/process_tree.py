"""The processes of a run, including those that left its tree or session."""

import os
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress

import psutil

# Marks the processes of a run. Children inherit it, even after setsid.
MARK = "ASSAY_SMOKE_RUN"

# Younger processes are inspected again: between fork and exec they have their parent's environment.
_SETTLED_SECONDS = 2.0
_POLL_SECONDS = 0.05
_LONGEST_COMMAND = 80
# Errors for a process that has ended, or that may not be inspected.
_ENDED = (psutil.NoSuchProcess, psutil.AccessDenied)
_KILL_SECONDS = 5.0


class ProcessTree:
    """All processes that descend from those started with `environment`.

    A process belongs to the tree if it has the mark in its environment, if its parent belongs to it, or
    if it is in the session of a root. Once seen, it stays known until it ends, even if it leaves the
    session and drops its environment. So call `living` regularly, as `MemoryWatch` does.
    """

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self._known: set[psutil.Process] = set()
        self._others: set[psutil.Process] = set()
        self._sessions: set[int] = set()
        self._lock = threading.Lock()  # a thread samples memory

    @property
    def environment(self) -> Mapping[str, str]:
        """Return the variables to start the run's processes with."""
        return {MARK: self._mark}

    def add_root(self, pid: int) -> None:
        """Add a process that was just started, and its session if it leads one."""
        with suppress(psutil.NoSuchProcess), self._lock:
            self._known.add(psutil.Process(pid))
        with suppress(ProcessLookupError):
            if os.getsid(pid) == pid:
                self._sessions.add(pid)

    def living(self) -> list[psutil.Process]:
        """Return the running processes in the order of their ids, without zombies."""
        with self._lock:
            self._known = {process for process in self._known if process.is_running()}
            found = list(psutil.process_iter())
            self._others.intersection_update(found)
            for process in found:
                if process not in self._known and process not in self._others:
                    self._sort(process)
            return sorted(filter(_runs, self._known), key=lambda one: one.pid)

    def wait(self, seconds: float) -> list[psutil.Process]:
        """Return the processes that still run after at most `seconds`."""
        deadline = time.monotonic() + seconds
        while (left := self.living()) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return left

    def kill(self) -> list[psutil.Process]:
        """Kill all processes, including those that they start meanwhile.

        Returns: processes that could not be killed, such as one blocked in a driver.
        """
        deadline = time.monotonic() + _KILL_SECONDS
        while (left := self.living()) and time.monotonic() < deadline:
            for process in left:
                with suppress(*_ENDED):
                    process.kill()
            psutil.wait_procs(left, timeout=_POLL_SECONDS)
        return left

    def _sort(self, process: psutil.Process) -> None:
        """Add a process to the known ones, or for good to the others."""
        with suppress(*_ENDED):
            if self._is_own(process):
                self._known.add(process)
            elif time.time() - process.create_time() > _SETTLED_SECONDS:
                self._others.add(process)

    def _is_own(self, process: psutil.Process) -> bool:
        if process.pid == os.getpid():
            return False
        with suppress(psutil.Error, OSError):  # another user's
            if process.environ().get(MARK) == self._mark:
                return True
        with suppress(ProcessLookupError, PermissionError):
            if os.getsid(process.pid) in self._sessions:
                return True
        parent = process.parent()
        return parent is not None and parent in self._known


def describe(process: psutil.Process) -> str:
    """Describe a process by its id and the start of its command."""
    command = ""
    with suppress(*_ENDED):
        command = " ".join(process.cmdline()) or process.name()
    short = command if len(command) <= _LONGEST_COMMAND else f"{command[:_LONGEST_COMMAND]}..."
    return f"process {process.pid} ({short or 'ended'})"


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
