"""The process that `assay.devices.detection` runs; it writes one line of JSON per answer.

All adapters run at the same time, each in its own fork, so that one that hangs or crashes does not
delay the others and torch is imported once. A single adapter runs without a fork. Answers go to a
separate pipe because vendors' libraries print to standard output.
"""

import json
import os
import selectors
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from assay.devices import registry
from assay.devices.run_string import Run
from assay.errors import AssayError, UsageError, exit_in_words

_POLL_SECONDS = 0.05
_CHUNK_BYTES = 1 << 16


def main(arguments: list[str]) -> None:
    """Announce the start with one line, then answer `PIPE detect KIND...` or `PIPE open DEVICE DTYPE`."""
    pipe, question, *names = arguments
    import torch  # noqa: F401 - not counted as time of an adapter

    with os.fdopen(int(pipe), "w", encoding="utf-8") as answers:
        print(json.dumps({"asked": names}), file=answers, flush=True)
        for answer in _detect_all(names) if question == "detect" else _open(Run(*names)):
            print(json.dumps(answer), file=answers, flush=True)


def _detect_all(kinds: list[str]) -> Iterator[dict[str, Any]]:
    """Yield one answer per adapter as they arrive."""
    if len(kinds) == 1:
        yield {"kind": kinds[0]} | _detect(kinds[0])
        return
    with selectors.DefaultSelector() as waiting:
        for kind in kinds:
            pid, pipe = _ask_in_fork(kind)
            waiting.register(pipe, selectors.EVENT_READ, (kind, pid, bytearray()))
        while waiting.get_map():
            waiting.select(_POLL_SECONDS)
            for key in list(waiting.get_map().values()):
                kind, pid, received = key.data
                # A process that the adapter left behind may hold the pipe open, so wait for the fork.
                ended, status = os.waitpid(pid, os.WNOHANG)
                received += _read_all(key.fd)
                if ended:
                    waiting.unregister(key.fd)
                    os.close(key.fd)
                    yield {"kind": kind} | _answer_of(received, os.waitstatus_to_exitcode(status))


def _ask_in_fork(kind: str) -> tuple[int, int]:
    """Return the process id of the fork and the pipe for its answer."""
    pipe, answer_end = os.pipe()
    os.set_blocking(pipe, False)
    pid = os.fork()
    if not pid:
        with os.fdopen(answer_end, "w", encoding="utf-8") as answer:
            json.dump(_detect(kind), answer)
        # Skip exit handlers: a vendor's library may crash in them.
        os._exit(0)
    os.close(answer_end)
    return pid, pipe


def _answer_of(received: bytes, code: int) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = json.loads(received)
    except ValueError:
        return {"ended": exit_in_words(code)}
    return answer if code == 0 else {"ended": exit_in_words(code)}


def _read_all(pipe: int) -> bytes:
    received = b""
    try:
        while chunk := os.read(pipe, _CHUNK_BYTES):
            received += chunk
    except BlockingIOError:
        pass
    return received


def _detect(kind: str) -> dict[str, Any]:
    try:
        return {"detections": [asdict(detection) for detection in registry.detect(kind)]}
    except AssayError as error:
        return _failure(error)


def _open(run: Run) -> Iterator[dict[str, Any]]:
    try:
        registry.open_run(run)
    except AssayError as error:
        yield _failure(error)
    else:
        yield {}


def _failure(error: AssayError) -> dict[str, Any]:
    kind = "usage" if isinstance(error, UsageError) else "machine"
    return {"error": kind, "message": str(error)}


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)  # as above
