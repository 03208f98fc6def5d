"""The processes of one run, also those that left its tree or its session."""

import os
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import psutil

# The variable by which a run's processes are known: children inherit it, setsid does not take it.
MARK = "ASSAY_SMOKE_RUN"

# Younger processes are looked at again: between fork and exec they have their parent's variables.
_SETTLED_SECONDS = 2.0
_POLL_SECONDS = 0.05
_LONGEST_COMMAND = 80
_KILL_SECONDS = 5.0


class ProcessTree:
    """All processes that come of those started with `environment`.

    A process belongs to it that has the mark among its variables, whose parent belongs to it, or
    that is in the session of one that was added by `add_root`. Once seen it is known until it ends,
    also where it has left the session and dropped its variables. A run of `living` now and then,
    as `MemoryWatch` makes it, is what sees them.
    """

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self._known: set[psutil.Process] = set()
        self._others: set[psutil.Process] = set()
        self._sessions: set[int] = set()
        self._lock = threading.Lock()  # a thread samples memory meanwhile

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables to start the run's processes with."""
        return {MARK: self._mark}

    def add_root(self, pid: int) -> None:
        """Count a process that was just started, and its session if it leads one of its own."""
        with suppress(psutil.NoSuchProcess), self._lock:
            self._known.add(psutil.Process(pid))
        with suppress(ProcessLookupError):
            if os.getsid(pid) == pid:
                self._sessions.add(pid)

    def living(self) -> list[psutil.Process]:
        """The processes that run now, in the order of their numbers; zombies do not."""
        with self._lock:
            self._known = {process for process in self._known if process.is_running()}
            found = list(psutil.process_iter())
            self._others.intersection_update(found)
            for process in found:
                if process not in self._known and process not in self._others:
                    self._sort(process)
            return sorted(filter(_runs, self._known), key=lambda one: one.pid)

    def wait(self, seconds: float) -> list[psutil.Process]:
        """The processes that still run after at most `seconds`."""
        deadline = time.monotonic() + seconds
        while (left := self.living()) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return left

    def kill(self) -> list[psutil.Process]:
        """Kill what runs, and what it starts meanwhile.

        Returns: what could not be killed, as a process in a driver's call cannot.
        """
        deadline = time.monotonic() + _KILL_SECONDS
        while (left := self.living()) and time.monotonic() < deadline:
            for process in left:
                with _gone_ignored():
                    process.kill()
            psutil.wait_procs(left, timeout=_POLL_SECONDS)
        return left

    def _sort(self, process: psutil.Process) -> None:
        """Put a process among the known ones, or among those that are others' for good."""
        with _gone_ignored():
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
    """A process in words: its number and the begin of its command."""
    command = ""
    with _gone_ignored():
        command = " ".join(process.cmdline()) or process.name()
    short = command if len(command) <= _LONGEST_COMMAND else f"{command[:_LONGEST_COMMAND]}..."
    return f"process {process.pid} ({short or 'ended'})"


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@contextmanager
def _gone_ignored() -> Iterator[None]:
    """Inside, a process that has ended, or may not be looked at, is passed over."""
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        yield
