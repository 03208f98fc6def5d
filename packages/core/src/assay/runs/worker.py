"""The child's half of `assay.runs.processes`: read a request, do the work, write an answer.

A module that `run_process` can run ends with

    if __name__ == "__main__":
        serve(work)
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from assay.errors import AssayError, UsageError
from assay.files import read_json_object, write_whole
from assay.progress import Progress
from assay.runs.progress.wire import WireProgress, write_event
from assay.watchdog import GRACE_SECONDS

Work = Callable[[dict[str, Any], Progress], dict[str, Any]]

# Equal names have equal hashes in every process, so that all walk a set of names in one order.
# transformers makes one rotary table for each kind of layer in such a set, and calls of a module are
# matched by number.
SAME_HASHES = {"PYTHONHASHSEED": "0"}


def serve(work: Work) -> None:
    """Call `work` with the request in the file of the first argument, and write its answer.

    The parent raises an AssayError of `work`. Any other exception is printed and ends this process;
    the parent then raises a ProcessError.
    """
    envelope = read_json_object(Path(sys.argv[1]))
    signal.signal(signal.SIGTERM, _interrupt)
    # Not if a user started it from its request file: its process group is then the shell's.
    if os.getppid() == envelope["parent"] and os.getpgrp() == os.getpid():
        threading.Thread(target=end_with_parent, daemon=True).start()
    answer: dict[str, Any]
    try:
        progress = WireProgress(partial(write_event, os.dup(sys.stderr.fileno())))
        answer = {"result": work(envelope["request"], progress)}
    except AssayError as error:
        answer = {"error": str(error), "usage": isinstance(error, UsageError)}
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    text = json.dumps(answer | {"peak_rss_bytes": peak_rss_bytes()})
    write_whole(Path(envelope["answer"]), text)
    sys.exit(0)


def peak_rss_bytes() -> int:
    """Return the peak of this process's resident memory."""
    try:
        # Not ru_maxrss, which on Linux includes the parent's peak before fork and exec.
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _interrupt(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one would interrupt the cleaning up
    raise KeyboardInterrupt


def end_with_parent() -> None:
    """Wait until the parent ends, then kill this process group; run in a thread.

    Needed if the parent is killed before it registers this process with its watchdog. The watchdog
    covers a process whose thread cannot run.
    """
    # The parent writes nothing to standard input, so reading ends only when the parent does. Read by
    # descriptor, as the interpreter aborts at its end if a thread is blocked in sys.stdin.
    try:
        while os.read(0, 1):
            pass
    except OSError:
        pass
    os.killpg(0, signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.killpg(0, signal.SIGKILL)
