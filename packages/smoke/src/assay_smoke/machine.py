"""A run's use of its machine: its processes, their memory, and what they leave behind.

A run is bracketed by `Snapshot.take` and `find_leftovers`, or runs in `record_leftovers`.
"""

import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self
from unittest import mock

import psutil

from assay.launch import start_ahead
from assay.progress import format_size

if TYPE_CHECKING:
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
        with suppress(psutil.NoSuchProcess, ProcessLookupError), self._lock:
            self._known.add(psutil.Process(pid))
            if os.getsid(pid) == pid:
                self._sessions.add(pid)

    def living(self) -> list[psutil.Process]:
        """Return the running processes in the order of their ids, without zombies."""
        with self._lock:
            self._known = {process for process in self._known if process.is_running()}
            found = list(psutil.process_iter())
            self._others.intersection_update(found)
            for process in found:
                if process in self._known or process in self._others:
                    continue
                with suppress(*_ENDED):
                    if self._is_own(process):
                        self._known.add(process)
                    elif time.time() - process.create_time() > _SETTLED_SECONDS:
                        self._others.add(process)
            return sorted(filter(_runs, self._known), key=lambda one: one.pid)

    def wait(self, seconds: float) -> list[psutil.Process]:
        """Return the processes that still run after at most `seconds`."""
        return _wait_for_none(self.living, seconds)

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


def _wait_for_none(
    find: Callable[[], list[psutil.Process]], seconds: float
) -> list[psutil.Process]:
    """Call `find` until it finds no process, for at most `seconds`, and return those that it found last."""
    deadline = time.monotonic() + seconds
    while (left := find()) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return left


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


# Helper processes, such as multiprocessing's resource tracker, notice the end of a run late.
PATIENCE_SECONDS = 3.0

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - only read

# Caches of libraries for later runs, and the folder for error files that torchrun 2.13 keeps.
KEPT_ON_PURPOSE = ("torchinductor_*", "triton_*", "torchelastic_*")

Kind = Literal["process", "port", "shared memory", "lock file", "temporary file"]

# Identity of a file: major and minor number of its device, and its inode.
_File = tuple[int, int, int]

_LOCK_ENDINGS = (".lock", ".lck", ".pid")


@dataclass(frozen=True, slots=True)
class Leftover:
    """A thing that a run left behind."""

    kind: Kind
    name: str
    """Description with its number or path."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The files and shared memory before a run."""

    temporary: Path
    """TMPDIR of the run."""
    files: frozenset[Path]
    shared_memory: frozenset[Path]

    @classmethod
    def take(cls, temporary: Path) -> "Snapshot":
        """Take a snapshot now."""
        return cls(temporary, frozenset(_files_in(temporary)), frozenset(_own_segments()))


def find_leftovers(
    before: Snapshot,
    tree: ProcessTree,
    *,
    patience_seconds: float = PATIENCE_SECONDS,
    allowed: Sequence[str] = (),
) -> list[Leftover]:
    """Find what the processes of `tree` left since `before`.

    allowed: patterns of file names that may stay in the temporary folder, as do KEPT_ON_PURPOSE.
    """
    processes = tree.wait(patience_seconds)
    found = [Leftover("process", f"{describe(process)} outlived the run") for process in processes]
    found += [Leftover("port", text) for text in _ports_of(processes)]
    segments = set(_own_segments()) - before.shared_memory
    for path in sorted(segments - _held_by_others(segments, processes)):
        with suppress(OSError):  # another run may have removed its segment meanwhile
            found.append(Leftover("shared memory", f"{path} ({path.stat().st_size} bytes)"))
    patterns = (*KEPT_ON_PURPOSE, *allowed)
    for path in sorted(set(_files_in(before.temporary)) - before.files):
        relative = path.relative_to(before.temporary)
        if not any(fnmatchcase(part, pattern) for part in relative.parts for pattern in patterns):
            is_lock = path.name.endswith(_LOCK_ENDINGS)
            found.append(Leftover("lock file" if is_lock else "temporary file", str(path)))
    return found


def find_in_group(group: int, patience_seconds: float = PATIENCE_SECONDS) -> list[Leftover]:
    """Find processes of a group other than its leader, and their ports."""

    def find_others() -> list[psutil.Process]:
        others = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError, PermissionError):
                if process.pid != group and os.getpgid(process.pid) == group and _runs(process):
                    others.append(process)
        return others

    left = _wait_for_none(find_others, patience_seconds)
    found = [Leftover("process", f"{describe(one)} outlived the ranks") for one in left]
    return found + [Leftover("port", text) for text in _ports_of(left)]


@contextmanager
def record_leftovers(temporary: Path, found: list[Leftover]) -> Iterator[None]:
    """Add to `found` what worlds within the block leave behind, then end their processes.

    temporary: the TMPDIR of the worlds.
    """
    start_ahead()  # otherwise the fork server and the watchdog would count as leftovers
    temporary.mkdir(parents=True, exist_ok=True)
    tree = ProcessTree()
    before = Snapshot.take(temporary)
    variables = {**tree.environment, "TMPDIR": str(temporary.resolve())}
    try:
        with mock.patch.dict(os.environ, variables):
            yield
    finally:
        try:
            found += find_leftovers(before, tree)
        finally:
            tree.kill()


def ports_taken(ports: Iterable[int]) -> list[int]:
    """Return the ports that are in use on this machine."""
    taken = []
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed port is free
            try:
                probe.bind(("", port))
            except OSError:
                taken.append(port)
    return taken


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _ports_of(processes: Iterable[psutil.Process]) -> list[str]:
    """Describe the ports on which these processes listen. A shared port is listed once."""
    held: dict[tuple[str, int], int] = {}
    for process in processes:
        with suppress(psutil.Error):
            for connection in process.net_connections(kind="inet"):
                if connection.status == psutil.CONN_LISTEN:
                    held.setdefault((connection.laddr.ip, connection.laddr.port), process.pid)
    return [f"{ip}:{port} is held by process {pid}" for (ip, port), pid in sorted(held.items())]


def _files_in(folder: Path) -> list[Path]:
    """Return the files and the empty folders in a folder."""
    return [
        path
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir() or not any(path.iterdir())
    ]


def _own_segments() -> list[Path]:
    """Return the segments of shared memory of this user."""
    found = []
    for path in SHARED_MEMORY.iterdir() if SHARED_MEMORY.is_dir() else ():
        with suppress(FileNotFoundError):
            if path.lstat().st_uid == os.getuid():
                found.append(path)
    return found


def _held_by_others(segments: set[Path], own: Iterable[psutil.Process]) -> set[Path]:
    """Return the segments that other processes have open or mapped. They belong to other runs."""
    pids = set(psutil.pids()) - {process.pid for process in own} if segments else set()
    used = set().union(*map(_used_by, pids))
    return {path for path in segments if _file_of(path) in used}


def _file_of(path: Path) -> _File | None:
    with suppress(OSError):
        status = path.stat()
        return os.major(status.st_dev), os.minor(status.st_dev), status.st_ino
    return None


def _used_by(pid: int) -> set[_File | None]:
    """Return the files that a process has open or mapped; none for other users' processes.

    Paths would not do: the creator of a semaphore has it mapped under its temporary first name.
    """
    folder = Path("/proc") / str(pid)
    used: set[_File | None] = set()
    with suppress(OSError):
        for line in (folder / "maps").read_text(encoding="utf-8", errors="replace").splitlines():
            _, _, _, device, inode, *_ = line.split(maxsplit=5)
            major, minor = (int(number, 16) for number in device.split(":"))
            used.add((major, minor, int(inode)))
    with suppress(OSError):
        used.update(map(_file_of, (folder / "fd").iterdir()))
    return used - {None}


# Messages of a full disk, an exhausted quota or a limit of file size.
FULL_DISK = ("No space left on device", "Disk quota exceeded", "File too large")

# Messages of drivers, the operating system and torch. A lost connection to a rank is not among them:
# a crashed peer causes the same message.
_SIGNS = {
    "out of disk": "|".join(FULL_DISK),
    "device lost": (
        r"device ?(?:was |is |has been )?lost|DEVICE_LOST|device not ready|uncorrectable \w+ error|"
        r"fell off the bus|device .* in error state"
    ),
    "network": r"No route to host|Network is unreachable|Temporary failure in name resolution",
}


def failed_part(text: str | None) -> str | None:
    """Return the part of the machine whose failure `text` reports, or None."""
    for part, sign in _SIGNS.items():
        if text and re.search(sign, text, re.IGNORECASE):
            return part
    return None
