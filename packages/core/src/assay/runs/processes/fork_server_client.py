"""The client of the fork server, which is started with the first process."""

import atexit
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from assay.errors import exit_in_words
from assay.runs.errors import ForkServerError
from assay.runs.processes.answering import SAME_HASHES
from assay.runs.processes.fork_server import ANSWER
from assay.watchdog import WATCHDOG

# A process with threads cannot be forked safely, and a vendor's module that torch imports
# automatically may initialize a device.
_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
}

# The server ends in milliseconds, or later if it still imports modules.
_END_SECONDS = 0.5


class ForkServer:
    """The fork server of this process and all its threads."""

    def __init__(self) -> None:
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
                connection.sendall(json.dumps(_imports(modules)).encode())
                self._preloads = True

    def start_leader(
        self,
        body: tuple[str, Sequence[str]],
        num_processes: int,
        preload: Sequence[str],
        descriptors: Sequence[int],
    ) -> int:
        """Fork the leader of a group. Returns: the id of its process and process group.

        body: MODULE:FUNCTION and arguments, as in `group_leader.lead`.
        Raises: ForkServerError if a module of `preload` cannot be imported.
        """
        request = _imports(preload) | {
            "body": body[0],
            "arguments": list(body[1]),
            "num_processes": num_processes,
        }
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
                        sys.executable,
                        "-P",
                        "-m",
                        "assay.runs.processes.fork_server",
                        str(theirs.fileno()),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=os.environ
                    | _ENVIRONMENT
                    | SAME_HASHES
                    | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
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
                self._process.wait(_END_SECONDS)
                WATCHDOG.forget("process", self._process.pid)
        self._process = self._connection = None
        self._preloads = False


def _imports(modules: Sequence[str]) -> dict[str, Any]:
    return {"sys_path": sys.path, "preload": list(modules)}


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
