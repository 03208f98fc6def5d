"""Finds where the processes of a hung run are blocked.

An aborted Python process prints its stacks if PYTHONFAULTHANDLER was set at its start. For other
processes, the kernel names the function in which they sleep.
"""

import re
import resource
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from assay.launch.failures.stacks import describe_place, read_stack
from assay_smoke.machine.process_tree import describe

# Makes Python print the stacks of its threads on SIGABRT.
ENVIRONMENT = {"PYTHONFAULTHANDLER": "1"}

_ABORT_SECONDS = 3.0
_POLL_SECONDS = 0.05
_CURRENT = re.compile(r"^Current thread (0x[0-9a-f]+)", re.MULTILINE)


def abort_with_stacks(processes: Sequence[psutil.Process], log: Path) -> list[str]:
    """Abort each process and describe where it was. The first may be the launcher of the others.

    log: file with the standard error of all.
    """
    return [_abort(process, log) for process in processes]


def _abort(process: psutil.Process, log: Path) -> str:
    name = describe(process)
    asleep = _kernel_function(process)
    begin = log.stat().st_size
    with suppress(psutil.Error, OSError, ValueError):
        resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))  # no core file
    with suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGABRT)
    deadline = time.monotonic() + _ABORT_SECONDS
    place = ""
    while time.monotonic() < deadline and not place:
        time.sleep(_POLL_SECONDS)
        place = _place(_text_after(log, begin))
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            time.sleep(2 * _POLL_SECONDS)  # its last output may not be in the log yet
            place = place or _place(_text_after(log, begin))
            break
    if place:
        return f"{name} was at {place}"
    return f"{name} was in the kernel's {asleep}" if asleep else name


def _place(text: str) -> str:
    current = _CURRENT.search(text)
    return describe_place(read_stack(f"{current[1]}\n{text}")) if current else ""


def _text_after(log: Path, begin: int) -> str:
    with log.open("rb") as file:
        file.seek(begin)
        return file.read().decode(errors="replace")


def _kernel_function(process: psutil.Process) -> str:
    """Return the kernel function in which a process sleeps, or an empty string."""
    with suppress(OSError):
        function = Path(f"/proc/{process.pid}/wchan").read_text(encoding="utf-8").strip()
        return "" if function == "0" else function
    return ""
