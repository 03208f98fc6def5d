"""Debug ranks under `--pdb`: rank 0 takes the terminal and stops at the failure."""

import bdb
import os
import pdb  # noqa: T100 - needed for --pdb
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from assay.launch import TimeLimits

DEBUGGED_RANK = 0
# Time limits must not end the ranks during debugging.
DEBUGGING_LIMITS = TimeLimits(
    start_seconds=600.0, collective_seconds=86_400.0, body_seconds=90_000.0
)

_TERMINAL = Path("/dev/tty")
_FLAG = "stopped"
# If all ranks fail, the others wait this long for rank 0 to signal that it has stopped.
_NOTICE_SECONDS = 2.0
_POLL_SECONDS = 0.05


class StoppedInRank(bdb.BdbQuit):
    """A failure that was debugged on rank 0; pytest does not open a debugger for it."""


def stop_at(error: BaseException, rank: int, folder: Path) -> None:
    """Open the debugger where `error` was raised on rank 0; on other ranks wait until it closes.

    Without a terminal, does nothing. folder: shared by all ranks of this test.
    """
    flag = folder / _FLAG
    if rank == DEBUGGED_RANK:
        flag.touch()
        try:
            _open_debugger(error)
        finally:
            flag.unlink()
        return
    # Returning would end all ranks, and the debugger with them.
    deadline = time.monotonic() + _NOTICE_SECONDS
    while flag.exists() or time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _open_debugger(error: BaseException) -> None:
    try:
        source, sink = _TERMINAL.open(), _TERMINAL.open("w")
    except OSError:
        return
    with source, sink, _in_foreground(source):
        sink.write(f"\n\nrank {DEBUGGED_RANK}: {type(error).__name__}: {error}\n")
        debugger = pdb.Pdb(stdin=source, stdout=sink, nosigint=True)
        debugger.reset()
        debugger.interaction(None, error.__traceback__)


@contextmanager
def _in_foreground(terminal: IO[str]) -> Iterator[None]:
    """Make this process group the terminal's foreground group, so that it may read."""
    before = os.tcgetpgrp(terminal.fileno())
    handler = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        os.tcsetpgrp(terminal.fileno(), os.getpgrp())
        yield
    finally:
        os.tcsetpgrp(terminal.fileno(), before)
        signal.signal(signal.SIGTTOU, handler)
