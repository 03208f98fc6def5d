"""Anonymous memory of processes. It excludes pages of files, which the system can reclaim."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(slots=True)
class Peaks:
    """The most anonymous bytes of processes."""

    largest: int
    """Of a single one."""
    together: int


@contextmanager
def highest_memory(process: int | None = None, interval_seconds: float = 0.02) -> Iterator[Peaks]:
    """Sample a process, this one by default, and its descendants until the block ends."""
    root = os.getpid() if process is None else process
    peaks, over = anonymous_memory(root), threading.Event()

    def watch() -> None:
        while not over.wait(interval_seconds):
            now = anonymous_memory(root)
            peaks.largest = max(peaks.largest, now.largest)
            peaks.together = max(peaks.together, now.together)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peaks
    finally:
        over.set()
        watcher.join()


def anonymous_memory(root: int) -> Peaks:
    """Return the current anonymous memory of process `root` and its descendants."""
    sizes, processes = [0], [str(root)]
    while processes:
        folder = Path("/proc", processes.pop())
        try:
            status = (folder / "status").read_text()
            started = [file.read_text() for file in folder.glob("task/*/children")]
        except OSError:
            continue  # it has ended
        processes += " ".join(started).split()
        lines = [line.split() for line in status.splitlines() if line.startswith("RssAnon:")]
        sizes += [1024 * int(words[1]) for words in lines]
    return Peaks(max(sizes), sum(sizes))
