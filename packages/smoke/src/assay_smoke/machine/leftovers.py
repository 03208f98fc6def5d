"""Finds processes, ports, shared memory and files that a run leaves behind.

Call `Snapshot.take` before the run and `find_leftovers` after it, or run it in `record_leftovers`.
"""

import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal
from unittest import mock

import psutil

from assay.launch import start_ahead
from assay_smoke.machine.process_tree import ProcessTree, describe

# Helper processes, such as multiprocessing's resource tracker, notice the end of a run late.
PATIENCE_SECONDS = 3.0

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - only read

# Caches of libraries for later runs.
KEPT_ON_PURPOSE = ("torchinductor_*", "triton_*")

Kind = Literal["process", "port", "shared memory", "lock file", "temporary file"]

_POLL_SECONDS = 0.05

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
    segments -= _held_by_others(segments, processes)
    found += [
        Leftover("shared memory", f"{path} ({_size(path)} bytes)")
        for path in sorted(segments)
        if path.exists()  # another run may have removed its segment meanwhile
    ]
    patterns = (*KEPT_ON_PURPOSE, *allowed)
    for path in sorted(set(_files_in(before.temporary)) - before.files):
        relative = path.relative_to(before.temporary)
        if not any(fnmatchcase(part, pattern) for part in relative.parts for pattern in patterns):
            is_lock = path.name.endswith(_LOCK_ENDINGS)
            found.append(Leftover("lock file" if is_lock else "temporary file", str(path)))
    return found


def find_in_group(group: int, patience_seconds: float = PATIENCE_SECONDS) -> list[Leftover]:
    """Find processes of a group other than its leader, and their ports."""
    deadline = time.monotonic() + patience_seconds
    while (left := _others_in(group)) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
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


def _others_in(group: int) -> list[psutil.Process]:
    others = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError, PermissionError):
            is_other = process.pid != group and os.getpgid(process.pid) == group
            if is_other and process.status() != psutil.STATUS_ZOMBIE:
                others.append(process)
    return others


def ports_taken(ports: Iterable[int]) -> list[int]:
    """Return the ports that are in use on this machine."""
    return [port for port in ports if _is_taken(port)]


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed port is free
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


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
    with suppress(FileNotFoundError):
        for path in SHARED_MEMORY.iterdir():
            with suppress(FileNotFoundError):
                if path.lstat().st_uid == os.getuid():
                    found.append(path)
    return found


def _held_by_others(segments: set[Path], own: Iterable[psutil.Process]) -> set[Path]:
    """Return the segments that other processes have open or mapped. They belong to other runs."""
    files: dict[_File, Path] = {}
    for path in segments:
        with suppress(FileNotFoundError):
            files[_file_of(path)] = path
    if not files:
        return set()
    own_pids = {process.pid for process in own}
    used = set().union(*(_used_by(pid) for pid in psutil.pids() if pid not in own_pids))
    return {path for file, path in files.items() if file in used}


def _file_of(path: Path) -> _File:
    status = path.stat()
    return os.major(status.st_dev), os.minor(status.st_dev), status.st_ino


def _used_by(pid: int) -> set[_File]:
    """Return the files that a process has open or mapped; none for other users' processes.

    Paths would not do: the creator of a semaphore has it mapped under its temporary first name.
    """
    folder = Path("/proc") / str(pid)
    used: set[_File] = set()
    with suppress(OSError):
        for line in (folder / "maps").read_text(encoding="utf-8", errors="replace").splitlines():
            _, _, _, device, inode, *_ = line.split(maxsplit=5)
            major, minor = (int(number, 16) for number in device.split(":"))
            used.add((major, minor, int(inode)))
    with suppress(OSError):
        for link in (folder / "fd").iterdir():
            with suppress(OSError):
                used.add(_file_of(link))
    return used


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.lstat().st_size
    return 0
