"""Questions about devices, asked in a process of their own.

No vendor's software can hang, crash or change the process that wants to know. (A process that
woke a driver may not fork any more; the one that asks here never does.)
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from assay.devices import registry
from assay.devices.base import Detection
from assay.devices.run_string import Run, parse_device
from assay.errors import AssayError, MachineError, UsageError, exit_in_words

# Vendors' torch modules take up to tens of seconds to load and to wake a driver.
DETECTION_TIMEOUT_SECONDS = 60.0
_POLL_SECONDS = 0.1
_OWN_END_SECONDS = 0.5
_END_TIMEOUT_SECONDS = 5.0

_ERRORS = {"usage": UsageError, "machine": MachineError}
_DETECTIONS = TypeAdapter(tuple[Detection, ...])


@dataclass(frozen=True, slots=True)
class DetectionAnswer:
    """What became of one adapter: its detections, or why there are none."""

    kind: str
    detections: tuple[Detection, ...] = ()
    problem: str = ""


def detect_isolated(
    kinds: tuple[str, ...], timeout_seconds: float = DETECTION_TIMEOUT_SECONDS
) -> tuple[DetectionAnswer, ...]:
    """What each of the adapters finds; one that hangs or crashes is an answer, too.

    timeout_seconds: for each adapter, the start of Python and torch counted.
    """
    found: dict[str, DetectionAnswer] = {}
    while waiting := [kind for kind in kinds if kind not in found]:
        conversation = _ask(["detect", *waiting], timeout_seconds)
        for kind, answer in zip(waiting, conversation.answers, strict=False):
            found[kind] = _read_answer(kind, answer)
        if len(conversation.answers) < len(waiting):
            kind = waiting[len(conversation.answers)]
            found[kind] = DetectionAnswer(kind, problem=conversation.problem(kind))
    return tuple(found[kind] for kind in kinds)


def require_run(run: Run, timeout_seconds: float = DETECTION_TIMEOUT_SECONDS) -> None:
    """Make sure that `run` can be opened, before anything expensive is begun.

    Devices that are the host's processor are opened here, the others in another process.
    Raises: as `registry.open_run`; MachineError if the adapter hangs or crashes.
    """
    kind = parse_device(run.device).kind
    if registry.is_host_adapter(kind):
        registry.open_run(run)
        return
    conversation = _ask(["open", run.device, run.dtype], timeout_seconds)
    if not conversation.answers:
        raise MachineError(conversation.problem(kind))
    answer = conversation.answers[0]
    if "error" in answer:
        error: type[AssayError] = _ERRORS[answer["error"]]
        raise error(answer["message"])


@dataclass(frozen=True, slots=True)
class _Conversation:
    """The answers that came, and how the process that gave them ended."""

    answers: tuple[dict[str, Any], ...]
    ended: str

    def problem(self, kind: str) -> str:
        return f"the adapter for {kind!r} is broken: asked for its devices, it {self.ended}"


def _ask(arguments: Sequence[str], timeout_seconds: float) -> _Conversation:
    """Start `assay.devices.detection.probe`; each of its answers is awaited for `timeout_seconds`."""
    pipe, answers_end = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "assay.devices.detection.probe", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=answers_end,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,
        )
    finally:
        os.close(answers_end)
    try:
        received, in_time = _receive(pipe, process, timeout_seconds)
    finally:
        os.close(pipe)
        _end(process)
    silent = f"did not answer within {timeout_seconds:g} s"
    code = process.returncode
    ended = "cannot be ended" if code is None else exit_in_words(code)
    # What follows the last line break is an answer that was cut short.
    lines = received.split(b"\n")[:-1]
    return _Conversation(tuple(json.loads(line) for line in lines), ended if in_time else silent)


def _receive(
    pipe: int, process: "subprocess.Popen[bytes]", timeout_seconds: float
) -> tuple[bytes, bool]:
    """All that comes through `pipe`, and whether no pause was longer than allowed."""
    received = b""
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        has_ended = process.poll() is not None
        readable, _, _ = select.select([pipe], [], [], _POLL_SECONDS)
        if readable:
            chunk = os.read(pipe, 1 << 16)
            if not chunk:
                return received, True
            received += chunk
            deadline = time.monotonic() + timeout_seconds
        elif has_ended:
            # Its own children may still hold the pipe open.
            return received, True
    return received, False


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the process and its children, after a moment in which it may end by itself."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(_OWN_END_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # A process that waits for its driver cannot be ended; it must not keep this one waiting.
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_TIMEOUT_SECONDS)


def _read_answer(kind: str, answer: dict[str, Any]) -> DetectionAnswer:
    if "error" in answer:
        return DetectionAnswer(kind, problem=answer["message"])
    return DetectionAnswer(kind, _DETECTIONS.validate_python(answer["detections"]))
