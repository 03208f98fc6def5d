"""The client of the fork server, which is started with the first world."""

import atexit
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from assay.errors import exit_in_words
from assay.launch.errors import ForkServerError
from assay.launch.processes.fork_server import ANSWER
from assay.runs.worker import SAME_HASHES
from assay.watchdog import WATCHDOG

# Imported for every world.
PRELOAD = (
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "assay.devices.cpu",
    "assay.launch.joining",
    "assay.launch.processes.group_leader",
)

# A process with threads cannot be forked safely, and a vendor's module that torch imports
# automatically may initialize a device.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
}

# The server ends in milliseconds, or later if it still imports modules.
_END_SECONDS = 0.5


class _ServerGoneError(Exception):
    """A fork server that ended during a request. is_new: it was started for this request."""

    def __init__(self, how: str, *, is_new: bool) -> None:
        super().__init__(how)
        self.how = how
        self.is_new = is_new


class ForkServer:
    """The fork server of this process and all its threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """Return the process id of the fork server; None before the first world."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the server if it does not run, with the current environment variables."""
        with self._lock:
            self._connected()

    def start_leader(
        self, folder: Path, num_ranks: int, preload: Sequence[str], descriptors: Sequence[int]
    ) -> int:
        """Fork the leader of a world. Returns: the id of its process and process group.

        Raises: ForkServerError if a module of `preload` cannot be imported.
        """
        request = {
            "folder": str(folder),
            "num_ranks": num_ranks,
            "sys_path": sys.path,
            "preload": [*PRELOAD, *preload],
        }
        with self._lock:
            try:
                try:
                    return self._ask(request, descriptors)
                except _ServerGoneError as gone:
                    if gone.is_new:
                        raise ForkServerError.ended(gone.how) from None
                    # It was killed between two worlds.
                    return self._ask(request, descriptors)
            except ForkServerError:
                raise
            except BaseException:
                # The next request must not read the answer to this one.
                self._forget()
                raise

    def _ask(self, request: dict[str, Any], descriptors: Sequence[int]) -> int:
        is_new = self._process is None
        process, connection = self._connected()
        try:
            socket.send_fds(connection, [json.dumps(request).encode()], descriptors)
            (answer,) = ANSWER.unpack(_receive(connection, ANSWER.size))
            if answer > 0:
                return int(answer)
            raise ForkServerError.refused(_receive(connection, -answer).decode())
        except (EOFError, ConnectionError):
            process.kill()
            how = exit_in_words(process.wait())
            self._forget()
            raise _ServerGoneError(how, is_new=is_new) from None

    def _connected(self) -> "tuple[subprocess.Popen[bytes], socket.socket]":
        if self._owner != os.getpid():  # this process is a fork of the owner
            self._process = self._connection = None
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
                        "assay.launch.processes.fork_server",
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
        """End the fork server; the next world starts another."""
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
