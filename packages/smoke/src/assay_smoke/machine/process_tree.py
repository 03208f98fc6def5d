"""The processes of a run, including those that left its tree or session, and their memory."""

import os
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterable

    from assay.devices.base import Device


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


_SAMPLE_SECONDS = 0.25

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
_STEP = 1024.0


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes in use before a run, at its peak, and after its teardown."""

    start_bytes: int
    peak_bytes: int
    end_bytes: int

    def is_back(self, slack_bytes: int) -> bool:
        """Return whether all but `slack_bytes` was released."""
        return self.end_bytes <= self.start_bytes + slack_bytes

    def __str__(self) -> str:
        left = self.end_bytes - self.start_bytes
        kept = f", {format_size(left)} not released" if left > 0 else ""
        return f"peak {format_size(self.peak_bytes - self.start_bytes)}{kept}"


def format_size(size_bytes: int) -> str:
    """Format a size in the largest unit that gives at least one."""
    size, unit = float(size_bytes), 0
    while abs(size) >= _STEP and unit + 1 < len(_UNITS):
        size, unit = size / _STEP, unit + 1
    return f"{size:.0f} {_UNITS[unit]}" if size == int(size) else f"{size:.1f} {_UNITS[unit]}"


def resident_bytes(processes: "Iterable[psutil.Process]") -> int:
    """Return the resident memory of all processes. Shared pages count once if the kernel tells."""
    total = 0
    for process in processes:
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            try:
                full = process.memory_full_info()
                total += int(getattr(full, "pss", 0) or full.rss)
            except psutil.AccessDenied:
                total += int(process.memory_info().rss)
    return total


class MemoryWatch:
    """Samples the memory of a process tree and of a device during the block.

    Drivers report only the free memory of the whole device, so other processes count too.

    device: after the block; None for the host and for drivers that do not report free memory.
    """

    host: MemoryUse
    device: MemoryUse | None = None

    def __init__(self, tree: ProcessTree, device: "Device | None" = None) -> None:
        self._tree = tree
        is_measured = (
            device is not None and device.torch_device != "cpu" and device.free_memory_bytes() > 0
        )
        self._device = device if is_measured else None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_ended, daemon=True)

    def __enter__(self) -> Self:
        self._free_at_start = self._free()
        self._start = self._peak = resident_bytes(self._tree.living())
        self._device_peak = 0
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        end, device_end = self._sample()
        self.host = MemoryUse(self._start, self._peak, end)
        if self._device is not None:
            self.device = MemoryUse(0, self._device_peak, device_end)

    def _sample_until_ended(self) -> None:
        while not self._ended.wait(_SAMPLE_SECONDS):
            self._sample()

    def _sample(self) -> tuple[int, int]:
        """Return the bytes of the tree and of the device."""
        now = resident_bytes(self._tree.living())
        on_device = self._free_at_start - self._free()
        self._peak = max(self._peak, now)
        self._device_peak = max(self._device_peak, on_device)
        return now, on_device

    def _free(self) -> int:
        return 0 if self._device is None else self._device.free_memory_bytes()
