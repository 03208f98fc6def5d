"""The child's half of `assay.runs.processes`: read a request, work, leave an answer.

A module that is to be run in a process of its own ends with

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
from pathlib import Path
from types import FrameType
from typing import Any

from assay.errors import AssayError, UsageError
from assay.runs.folders import write_whole
from assay.runs.progress import Progress, WireProgress

# What a process gets between being asked to end and being killed: to flush what it has.
GRACE_SECONDS = 5.0

Work = Callable[[dict[str, Any], Progress], dict[str, Any]]


def serve(work: Work) -> None:
    """Answer the request whose file is the first argument. Ends the process.

    An AssayError of `work` travels to the parent and is raised there; any other exception is
    printed and becomes the parent's ProcessError.
    """
    envelope = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    signal.signal(signal.SIGTERM, _interrupt)
    # Not when it is started by hand, from its request file: then the group is not its own.
    if os.getppid() == envelope["parent"] and os.getpgrp() == os.getpid():
        threading.Thread(target=end_with_parent, daemon=True).start()
    answer: dict[str, Any]
    try:
        answer = {"result": work(envelope["request"], WireProgress(os.dup(sys.stderr.fileno())))}
    except AssayError as error:
        answer = {"error": str(error), "usage": isinstance(error, UsageError)}
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    text = json.dumps(answer | {"peak_rss_bytes": peak_rss_bytes()})
    write_whole(Path(envelope["answer"]), text)
    sys.exit(0)


def peak_rss_bytes() -> int:
    """The most memory that this process has had resident."""
    try:
        # Not ru_maxrss, which Linux carries over from the parent through fork and exec.
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def end_with_parent() -> None:
    """Wait until the parent ends, then end this process group."""
    # The parent holds the other end of standard input and writes nothing. By descriptor: a thread
    # that is blocked inside of sys.stdin makes the interpreter abort when it ends.
    try:
        while os.read(0, 1):
            pass
    except OSError:
        pass
    os.killpg(0, signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.killpg(0, signal.SIGKILL)
