"""Detect, list and open devices in a separate process.

A vendor's software then cannot hang, crash or change the calling process, which can still fork
afterwards. A process that has initialized a driver cannot fork.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from assay.devices import registry
from assay.devices.base import Detection, DeviceVendor
from assay.devices.registry import adapter_names, make_broken_adapter_error
from assay.devices.run_string import Run, parse_device
from assay.errors import AssayError, MachineError, UsageError, exit_in_words
from assay.watchdog import signal_group, watched

# Importing a vendor's torch module and initializing its driver takes up to tens of seconds.
DETECTION_TIMEOUT_SECONDS = 60.0
# Apple's frameworks fail in a forked process that has not executed another program.
# Source: https://github.com/pytorch/pytorch/pull/178037
FORKS_KEEP_DRIVERS = sys.platform != "darwin"
# The least time for adapters, however long Python and torch took to start.
_LEAST_SECONDS = 3.0
_POLL_SECONDS = 0.1
_OWN_END_SECONDS = 0.5
_END_TIMEOUT_SECONDS = 5.0

_PROBE = "assay.devices.probe"
_ERRORS = {"usage": UsageError, "machine": MachineError}
_DETECTIONS = TypeAdapter(tuple[Detection, ...])


Status = Literal["present", "absent", "broken"]


@dataclass(frozen=True, slots=True)
class ListedDevice:
    """One vendor's line of `assay devices`."""

    device: str
    """Its name in a RUN."""
    status: Status
    vendor: DeviceVendor | None = None
    """None if a broken adapter did not report it."""
    products: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    missing: str = ""
    """Requirement that a run on it lacks; "" if it is present."""

    def to_json(self) -> dict[str, Any]:
        """Return the line as `assay devices --json` prints it."""
        vendor = self.vendor
        return {
            **asdict(self),
            "vendor": vendor.name if vendor else None,
            "title": vendor.title if vendor else None,
            "count": len(self.products),
            "distributed_backend": vendor.distributed_backend if vendor else None,
            "compile_backend": vendor.compile_backend if vendor else None,
            "runner_labels": list(vendor.runner_labels) if vendor else [],
            "verified": vendor.verified if vendor else "",
        }


def list_devices(timeout_seconds: float) -> tuple[ListedDevice, ...]:
    """Return one line per vendor, present ones first.

    timeout_seconds: as for `detect_isolated`.
    """
    lines = detect_isolated(adapter_names(), timeout_seconds)
    order: list[Status] = ["present", "absent", "broken"]
    return tuple(sorted(lines, key=lambda line: (order.index(line.status), line.device)))


def detect_isolated(
    kinds: tuple[str, ...], timeout_seconds: float = DETECTION_TIMEOUT_SECONDS
) -> tuple[ListedDevice, ...]:
    """Detect the devices of every adapter at the same time.

    A broken adapter, or one that hangs or crashes, is a line and not an error.
    timeout_seconds: for all adapters together, counted from the start of the process that asks
        them. Starting Python and torch takes seconds of it.
    """
    if FORKS_KEEP_DRIVERS:
        return _detect_in_one_process(kinds, timeout_seconds)
    with ThreadPoolExecutor(len(kinds)) as threads:
        answers = threads.map(lambda kind: _detect_in_one_process((kind,), timeout_seconds), kinds)
        return tuple(chain.from_iterable(answers))


def _detect_in_one_process(
    kinds: tuple[str, ...], timeout_seconds: float
) -> tuple[ListedDevice, ...]:
    answers, ended = _ask(["detect", *kinds], timeout_seconds)
    by_kind = {answer["kind"]: answer for answer in answers}
    lines = (_read_answer(kind, by_kind.get(kind, {"ended": ended})) for kind in kinds)
    return tuple(chain.from_iterable(lines))


def require_run(run: Run, timeout_seconds: float = DETECTION_TIMEOUT_SECONDS) -> None:
    """Check that `run` can be opened, before anything expensive starts.

    Opens host and simulated devices in this process, others in another one.
    Raises: as `registry.open_run`; MachineError if the adapter hangs or crashes.
    """
    kind = parse_device(run.device).kind
    if registry.is_host_adapter(kind):
        registry.open_run(run)
        return
    answers, ended = _ask(["open", run.device, run.dtype], timeout_seconds)
    if not answers:
        raise _silent(kind, ended)
    if "error" in answers[0]:
        error: type[AssayError] = _ERRORS[answers[0]["error"]]
        raise error(answers[0]["message"])


def _ask(arguments: Sequence[str], timeout_seconds: float) -> tuple[list[dict[str, Any]], str]:
    """Run `assay.devices.probe`; return its answers, and how it ended."""
    pipe, answers_end = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", _PROBE, str(answers_end), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[answers_end],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                # Adapters import what they need. torch would import every vendor's package.
                "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            },
            start_new_session=True,
        )
    except OSError:
        os.close(pipe)
        raise
    finally:
        os.close(answers_end)
    in_time = False
    try:
        with watched("group", process.pid):
            received, in_time = _receive(pipe, process, timeout_seconds)
    finally:
        os.close(pipe)
        _end(process, _OWN_END_SECONDS if in_time else 0.0)
    code = process.returncode
    ended = "cannot be ended" if code is None else exit_in_words(code)
    if not in_time and received:
        ended = f"did not answer within {timeout_seconds:g} s"
    elif not in_time:
        limit = f"{DETECTION_TIMEOUT_SECONDS:g} s"
        ended = f"was not asked: Python and torch did not start within {limit}"
    # The first line says that the adapters were asked. Text after the last line break is incomplete.
    lines = received.split(b"\n")[1:-1]
    return [json.loads(line) for line in lines], ended


def _receive(
    pipe: int, process: "subprocess.Popen[bytes]", timeout_seconds: float
) -> tuple[bytes, bool]:
    """Read all bytes from `pipe`; return them and True, or False after a timeout.

    The first bytes, which announce the start, have `DETECTION_TIMEOUT_SECONDS` to arrive.
    """
    received = b""
    begin = time.monotonic()
    deadline = begin + DETECTION_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        has_ended = process.poll() is not None
        readable, _, _ = select.select([pipe], [], [], _POLL_SECONDS)
        if readable:
            chunk = os.read(pipe, 1 << 16)
            if not chunk:
                return received, True
            if not received:
                deadline = max(begin + timeout_seconds, time.monotonic() + _LEAST_SECONDS)
            received += chunk
        elif has_ended:
            # Children of the process may still hold the pipe open.
            return received, True
    return received, False


def _end(process: "subprocess.Popen[bytes]", patience_seconds: float) -> None:
    """Kill the process and its children, after giving it some time to end by itself."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(patience_seconds)
    signal_group(process.pid, signal.SIGKILL)
    # A process that waits inside a driver cannot be killed, so do not wait long for it.
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_TIMEOUT_SECONDS)


def _silent(kind: str, ended: str) -> MachineError:
    return make_broken_adapter_error(kind, f"asked for its devices, it {ended}")


def _read_answer(kind: str, answer: dict[str, Any]) -> list[ListedDevice]:
    if "ended" in answer:
        problem = str(_silent(kind, answer["ended"]))
    elif "error" in answer:
        problem = answer["message"]
    else:
        try:
            return [
                ListedDevice(
                    kind,
                    "present" if found.present else "absent",
                    found.vendor,
                    found.products,
                    found.variants,
                    found.missing,
                )
                for found in _DETECTIONS.validate_python(answer["detections"])
            ]
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            problem = str(make_broken_adapter_error(kind, f"{where}: {first['msg']}"))
    return [ListedDevice(kind, "broken", missing=problem)]
