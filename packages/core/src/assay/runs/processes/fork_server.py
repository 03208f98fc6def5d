"""The fork server: a process that imports torch and other slow modules once.

It starts no thread and opens no device, because a fork inherits neither in a usable state. For each
request it forks the leader of a group of processes, and answers with the leader's pid. A request
without a body only imports modules.
"""

import gc
import importlib
import json
import os
import signal
import socket
import struct
import sys
import traceback
from contextlib import suppress
from typing import Any, NoReturn

from assay.runs.processes.group_leader import lead

ANSWER = struct.Struct("=q")
MAX_REQUEST_BYTES = 1 << 16
# The most descriptors of a leader: parent and exits of `group_leader.lead`, and those of the body.
MAX_DESCRIPTORS = 8


def serve(connection: socket.socket) -> NoReturn:
    """Fork a leader for each request until the other end of `connection` is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # leaders are reaped by the system
    gc.disable()  # saves a fifth of the time of imports
    while True:
        with suppress(ConnectionResetError):
            data, descriptors, _, _ = socket.recv_fds(
                connection, MAX_REQUEST_BYTES, MAX_DESCRIPTORS
            )
            if data:
                _answer(connection, json.loads(data), descriptors)
                continue
        os._exit(0)


def _answer(connection: socket.socket, request: dict[str, Any], descriptors: list[int]) -> None:
    try:
        _import(request)
        pid = _fork_leader(connection, request, descriptors) if "body" in request else 0
        connection.sendall(ANSWER.pack(pid))
    except Exception:  # noqa: BLE001 - sent to the parent
        text = traceback.format_exc().encode()
        connection.sendall(ANSWER.pack(-len(text)) + text)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _fork_leader(connection: socket.socket, request: dict[str, Any], descriptors: list[int]) -> int:
    pid = os.fork()
    if not pid:
        connection.close()
        gc.enable()
        lead(request["body"], request["arguments"], request["num_processes"], *descriptors)
    with suppress(OSError):  # the leader does the same
        os.setpgid(pid, pid)
    return pid


def _import(request: dict[str, Any]) -> None:
    sys.path[:] = request["sys_path"]
    before = len(sys.modules)
    for module in request["preload"]:
        importlib.import_module(module)
    if len(sys.modules) > before:
        # Imported objects are never freed; visiting them would only unshare their pages.
        gc.freeze()


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
