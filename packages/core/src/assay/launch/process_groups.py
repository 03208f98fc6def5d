"""Groups of processes: pipes to them, the client of the fork server, and their begin and end.

A group has a leader, which the fork server forks, and the processes that the leader forks. They may run in
another Python environment, as those of a candidate.
"""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from assay.errors import UsageError, exit_in_words
from assay.launch.failures import ForkServerError
from assay.launch.fork_server import ANSWER
from assay.watchdog import GRACE_SECONDS, WATCHDOG, signal_group, watched

# Equal names have equal hashes in every process, so that all walk a set of names in one order.
# transformers makes one rotary table for each kind of layer in such a set, and calls of a module are
# matched by number.
SAME_HASHES = {"PYTHONHASHSEED": "0"}

# A process with threads cannot be forked safely, and a vendor's module that torch imports
# automatically may initialize a device.
_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
}

# The server ends in milliseconds, or later if it still imports modules.
_SERVER_END_SECONDS = 0.5
# Killed processes disappear within this time.
_END_SECONDS = 10.0

_CHUNK_BYTES = 1 << 16


class Pipe:
    """The two descriptors of a pipe, as opened in this process."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        self._open = {self.reader, self.writer}

    def close_reader(self) -> None:
        """Close this process's copy of the reading end."""
        self._close(self.reader)

    def close_writer(self) -> None:
        """Close this process's copy of the writing end."""
        self._close(self.writer)

    def close(self) -> None:
        """Close both ends if they are open."""
        self.close_reader()
        self.close_writer()

    def _close(self, descriptor: int) -> None:
        if descriptor in self._open:
            self._open.discard(descriptor)
            os.close(descriptor)


class LinePipe(Pipe):
    """A pipe whose reader gets JSON objects, one a line."""

    def __init__(self) -> None:
        super().__init__()
        os.set_blocking(self.reader, False)
        self._partial = b""
        self.ended = False

    def read_lines(self) -> list[dict[str, Any]]:
        """Return the objects written since the last call. Sets `ended` once all writers are closed."""
        while not self.ended:
            try:
                chunk = os.read(self.reader, _CHUNK_BYTES)
            except BlockingIOError:
                break
            self.ended = not chunk
            self._partial += chunk
        *lines, self._partial = self._partial.split(b"\n")
        # A process that is interrupted as it writes leaves half of a line.
        return [value for line in lines if (value := _parse(line)) is not None]

    def read_to_end(self, deadline: float) -> None:
        """Wait until all writers are closed, at most until `deadline` (of `time.monotonic`)."""
        while not self.ended and (left := deadline - time.monotonic()) > 0:
            wait_for_any((self,), left)
            self.read_lines()


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def wait_for_any(pipes: "tuple[LinePipe, ...]", seconds: float) -> None:
    """Wait until one of `pipes` can be read, at most `seconds`."""
    readable = [pipe.reader for pipe in pipes if not pipe.ended]
    select.select(readable, [], [], seconds)


class ForkServer:
    """The fork server of this process and all its threads.

    python: another Python environment, which imports its own packages; None for this one.
    """

    def __init__(self, python: Path | None = None) -> None:
        self._python = python
        self._lock = threading.Lock()
        self._owner = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._preloads = False
        """True until the answer to a `preload` is read."""

    @property
    def pid(self) -> int | None:
        """Return the process id of the fork server; None before the first process."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the server if it does not run, with the current environment variables."""
        with self._lock:
            self._connected()

    def preload(self, modules: Sequence[str]) -> None:
        """Let the server import `modules` while this process goes on.

        A failed import is an error of the next request that needs the module.
        """
        with self._lock:
            _, connection = self._connected()
            if not self._preloads:
                connection.sendall(json.dumps(self._imports(modules)).encode())
                self._preloads = True

    def start_leader(
        self, folder: Path, num_processes: int, preload: Sequence[str], descriptors: Sequence[int]
    ) -> int:
        """Fork the leader of a group. Returns: the id of its process and process group.

        folder, descriptors: as in `fork_server.lead`.
        Raises: ForkServerError if a module of `preload` cannot be imported.
        """
        request = self._imports(preload) | {"folder": str(folder), "num_processes": num_processes}
        message = json.dumps(request).encode()
        with self._lock:
            while True:
                is_new = self._process is None
                process, connection = self._connected()
                try:
                    if self._preloads:
                        self._read_answer(connection)
                    socket.send_fds(connection, [message], descriptors)
                    pid, refusal = self._read_answer(connection)
                except (EOFError, ConnectionError):
                    process.kill()
                    how = exit_in_words(process.wait())
                    self._forget()
                    if is_new:
                        raise ForkServerError.ended(how) from None
                    # It was killed between two requests: start another.
                except BaseException:
                    # The next request must not read the answer to this one.
                    self._forget()
                    raise
                else:
                    if refusal:
                        raise ForkServerError.refused(refusal)
                    return pid

    def _imports(self, modules: Sequence[str]) -> dict[str, Any]:
        return {"sys_path": None if self._python else sys.path, "preload": list(modules)}

    def _read_answer(self, connection: socket.socket) -> tuple[int, str]:
        """Read the pid that the server answered, or the reason of its refusal."""
        self._preloads = False
        (answer,) = ANSWER.unpack(_receive(connection, ANSWER.size))
        return answer, "" if answer >= 0 else _receive(connection, -answer).decode()

    def _connected(self) -> "tuple[subprocess.Popen[bytes], socket.socket]":
        if self._owner != os.getpid():  # this process is a fork of the owner
            self._process = self._connection = None
            self._preloads = False
            self._owner = os.getpid()
        if self._process is not None and self._process.poll() is not None:
            self._forget()
        if self._process is None or self._connection is None:
            ours, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    # -P: files in the working directory must not shadow our modules.
                    [
                        self._python or sys.executable,
                        "-P",
                        "-m",
                        "assay.launch.fork_server",
                        str(theirs.fileno()),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=own_variables(self._python, os.environ) | _ENVIRONMENT | SAME_HASHES,
                    pass_fds=(theirs.fileno(),),
                    process_group=0,  # Ctrl-C in a terminal is for this process
                )
            self._connection = ours
            # It ends when the connection is closed, unless an import hangs.
            WATCHDOG.watch("process", self._process.pid)
        return self._process, self._connection

    def stop(self) -> None:
        """End the fork server; the next process starts another."""
        with self._lock:
            if self._owner == os.getpid():
                self._forget()

    def _forget(self) -> None:
        """Close the connection, which ends the fork server, and forget its process."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_SERVER_END_SECONDS)
                WATCHDOG.forget("process", self._process.pid)
        self._process = self._connection = None
        self._preloads = False


def own_variables(python: Path | None, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a process in `python`: another environment has its own import path."""
    if python is None:
        return {**variables, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return {name: value for name, value in variables.items() if not name.startswith("PYTHON")}


def _receive(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        chunk = connection.recv(size - len(received))
        if not chunk:
            raise EOFError
        received += chunk
    return received


FORK_SERVER = ForkServer()
atexit.register(FORK_SERVER.stop)


@cache
def _server_of(python: Path) -> ForkServer:
    server = ForkServer(python)
    atexit.register(server.stop)
    return server


LEADER_LOST = "the process that leads a group is gone; was the machine cleaned?"

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
                    wait_for_any((self.exits,), left)
                    self.receive()
        finally:
            signal_group(self.id, signal.SIGKILL)
            self.exits.read_to_end(time.monotonic() + _END_SECONDS)

    def _have_ended(self) -> bool:
        return len(self.exit_codes) == self._num_processes


@contextmanager
def started_group(
    folder: Path,
    num_processes: int,
    preload: Sequence[str],
    descriptors: tuple[int, int],
    grace_seconds: float,
    python: Path | None = None,
) -> Iterator[ProcessGroup]:
    """Start processes that answer a call, and end them on exit. They end if this process is killed.

    folder: of the call, as in `child_process.answer`.
    preload: modules that the fork server imports first, once for all groups.
    descriptors: its gate and its reports; this process may close its own afterwards.
    python: as of a `ForkServer`.
    grace_seconds: between SIGTERM and SIGKILL if the processes still run on exit; 0 for SIGKILL only.
    Raises: ForkServerError if a module cannot be imported.
    """
    # The leader ends the group when `parent` is closed, which also happens if this process dies.
    with closing(Pipe()) as parent, closing(LinePipe()) as exits:
        server = FORK_SERVER if python is None else _server_of(python)
        group_id = server.start_leader(
            folder, num_processes, preload, (parent.reader, exits.writer, *descriptors)
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


_CORE = "assay-core"
_ASK_SECONDS = 120.0
# The imports cost seconds here, and a reference that nobody can use costs more.
_ASK = f"""
import json
import sys
from importlib.metadata import PackageNotFoundError, version
try:
    found = version("{_CORE}")
    import assay.launch.fork_server
    if found == sys.argv[1]:
        import torch, transformers
except PackageNotFoundError:
    found = ""
sys.stdout.write(chr(10) + json.dumps([found, sys.prefix]))
"""


def find_python(path: Path) -> Path | None:
    """Return the Python of a virtual environment, or the executable itself, as an absolute path; None without one."""
    inside = [path / "bin" / "python", path / "Scripts" / "python.exe"]
    # Not resolved: Python finds a virtual environment by the path of the link.
    found = (one.absolute() for one in ([path] if path.is_file() else inside))
    return next((one for one in found if one.is_file() and os.access(one, os.X_OK)), None)


def require_candidate_python(python: Path, golden: Path | None) -> None:
    """Raise UsageError, in one sentence, unless `python` runs and has this version of assay.

    Without a golden, raise it also if `python` has the packages of this process. Links of several environments lead to
    one file.
    """
    here, (found, prefix) = version(_CORE), _ask_environment(python)
    if found != here:
        what = f"has assay {found}, and this is {here}" if found else "has no assay"
        raise UsageError(
            f"--candidate-python {python} {what}: {python} -m pip install {_CORE}=={here}"
        )
    if golden is None and Path(prefix).resolve() == Path(sys.prefix).resolve():
        raise UsageError(
            f"--candidate-python {python} is the Python that runs assay: both sides would run the same code; name"
            " that of another environment"
        )


def _ask_environment(python: Path) -> tuple[str, str]:
    """Return the version of assay, "" without it, and `sys.prefix`. Raises: UsageError."""
    name = f"--candidate-python {python}"
    try:
        done = subprocess.run(
            [python, "-P", "-c", _ASK, version(_CORE)],
            env=own_variables(python, os.environ),
            capture_output=True,
            text=True,
            timeout=_ASK_SECONDS,
            check=False,
        )
    except OSError as error:
        raise UsageError(f"{name} cannot be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise UsageError(f"{name} gave no answer in {_ASK_SECONDS:g} s") from None
    try:
        found, prefix = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["it printed no answer"])[-1]
        raise UsageError(f"{name} does not work: {last}") from None
    return found, prefix
