"""Functions that the tests of `call` run in another process."""

import atexit
import os
import pickle
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from assay.errors import MachineError, UsageError
from assay.progress import Progress, advance_task, counted

Result = dict[str, Any]


class WorkerUsageError(UsageError):
    """An error class of another package than `assay.errors`."""


def echo(request: dict[str, Any], _: Progress) -> Result:
    return {"echo": request, "variable": os.environ.get("ASSAY_TEST_VARIABLE")}


def hash_names(_: dict[str, Any], __: Progress) -> Result:
    return {"hashes": [hash(name) for name in ("sliding_attention", "full_attention")]}


def usage(_: dict[str, Any], __: Progress) -> Result:
    raise WorkerUsageError("no such model: 'x'\nsecond line")


def machine(_: dict[str, Any], __: Progress) -> Result:
    raise MachineError("no such device")


def crash(_: dict[str, Any], __: Progress) -> Result:
    sys.stderr.write("about to fail\n")
    raise ZeroDivisionError("boom")


def crash_after_answer(_: dict[str, Any], __: Progress) -> Result:
    atexit.register(os._exit, 139)
    return {"done": True}


def kill(_: dict[str, Any], __: Progress) -> Result:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def leave(request: dict[str, Any], _: Progress) -> Result:
    os._exit(int(request["code"]))


def talk(__: dict[str, Any], progress: Progress) -> Result:
    sys.stdout.write("to stdout\n")
    sys.stdout.flush()
    sys.stderr.write("10%\r20%\r")
    sys.stderr.flush()
    with progress.task("work", 3) as task:
        task.advance()
        warnings.warn("a warning", stacklevel=1)
        os.write(1, b"from C\n")
        subprocess.run(["echo", "of a child"], check=True)
    progress.note("a note")
    sys.stderr.write("no newline at the end")
    return {}


def take_long(__: dict[str, Any], progress: Progress) -> Result:
    progress.number_phases(2)
    with progress.step("loads"):
        for _ in counted("reads files", range(3), "files"):
            time.sleep(0.4)
    with progress.task("runs", 4, "steps"):
        for _ in range(4):
            time.sleep(0.4)
            advance_task("steps")
    return {}


def hang(request: dict[str, Any], progress: Progress) -> Result:
    grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    progress.note("hanging")
    try:
        Path(request["pids"]).write_text(f"{os.getpid()} {grandchild.pid}\n")
        time.sleep(600)
    except KeyboardInterrupt:
        Path(request["cleaned"]).write_text("flushed")
        raise
    return {}


def hold_interpreter(request: dict[str, Any], _: Progress) -> Result:
    Path(request["pids"]).write_text(f"{os.getpid()}\n")
    re.match(r"(a+)+$", "a" * 40 + "b")  # hours, in one call of C
    return {}


def nap(_: dict[str, Any], __: Progress) -> Result:
    time.sleep(0.3)
    return {}


def leave_child_behind(_: dict[str, Any], __: Progress) -> Result:
    script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(); "
    child = subprocess.Popen(
        [sys.executable, "-c", script + "time.sleep(600)"], stderr=subprocess.PIPE
    )
    return {"pid": child.pid}


def wait_forever(_: dict[str, Any], progress: Progress) -> Result:
    with progress.step("waits"):
        while True:
            time.sleep(0.05)


def print_lines(request: dict[str, Any], _: Progress) -> Result:
    sys.stdout.write("".join(f"line {number}\n" for number in range(request["count"])))
    return {}


def break_pickle(_: dict[str, Any], __: Progress) -> Result:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no pickles")

    pickle.dump = pickle.dumps = broken  # type: ignore[assignment]
    return {"done": True}


class _Unreadable:
    def __reduce__(self) -> Any:
        return int, ("no number",)


def unreadable(_: dict[str, Any], __: Progress) -> Result:
    return {"value": _Unreadable()}
