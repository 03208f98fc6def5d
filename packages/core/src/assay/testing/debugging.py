"""`--pdb` on ranks: rank 0 borrows the terminal and stops where its test failed."""

import bdb
import os
import pdb  # noqa: T100 - it is what this is for
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from assay.launch import TimeLimits

DEBUGGED_RANK = 0
# Nothing is given up while somebody thinks.
WITHOUT_HURRY = TimeLimits(start_seconds=600.0, collective_seconds=86_400.0, body_seconds=90_000.0)

_TERMINAL = Path("/dev/tty")
_FLAG = "stopped"
# Of a failure on all ranks, the others wait so long to hear that rank 0 has stopped.
_NOTICE_SECONDS = 2.0
_POLL_SECONDS = 0.05


class StoppedInRank(bdb.BdbQuit):
    """A test failed on ranks, and was looked at there: pytest then opens no debugger of its own."""


def stop_at(error: BaseException, rank: int, folder: Path) -> None:
    """Open the debugger where `error` was raised, on rank 0; on others wait for its end.

    folder: of all ranks of this test. Without a terminal nothing happens.
    """
    flag = folder / _FLAG
    if rank == DEBUGGED_RANK:
        flag.touch()
        try:
            _open_debugger(error)
        finally:
            flag.unlink()
        return
    # A rank that failed ends the whole world.
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
    """Ranks are a process group of their own: one in the background may not read."""
    before = os.tcgetpgrp(terminal.fileno())
    handler = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        os.tcsetpgrp(terminal.fileno(), os.getpgrp())
        yield
    finally:
        os.tcsetpgrp(terminal.fileno(), before)
        signal.signal(signal.SIGTTOU, handler)
