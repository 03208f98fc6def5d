"""Processes of test_s3.py that write traces; all are forked from this one, which imports torch once.

writers.py world URL [VICTIM]: 8 processes write 8 ranks each; VICTIM is killed in the middle.
writers.py kills LOCATION COUNT: COUNT processes write, one after another, until each is killed.
"""

import os
import random
import signal
import sys
import time
from contextlib import ExitStack

import torch

from assay.sites import Call, CallSite
from assay.trace import TraceWriter

PROCESSES = RANKS = 8
STEPS = 4
# The index is stored once a second: a process that is killed in its last step has stored some of it.
STEP_SECONDS = 1.0
LONGEST_LIFE_SECONDS = 3.0


def write_ranks(url: str, process: int, progress: int) -> None:
    """Write the ranks of one process; a byte in `progress` says that the next step begins."""
    with ExitStack() as stack:
        size = PROCESSES * RANKS
        ranks = range(process * RANKS, (process + 1) * RANKS)
        writers = {
            rank: stack.enter_context(
                TraceWriter(f"{url}/rank-{rank}", {"rank": rank, "world_size": size})
            )
            for rank in ranks
        }
        for step in range(STEPS):
            os.write(progress, b".")
            time.sleep(STEP_SECONDS)
            for rank, writer in writers.items():
                values = torch.arange(64.0) + rank + 100 * step
                site = CallSite(step, "layer", rank=rank)
                writer.add(Call(site, "Linear", None, step), {"input.x": values, "output": -values})
                writer.flush()


def write_without_end(location: str) -> None:
    with TraceWriter(location, {}) as writer:
        step = 0
        while True:
            values = torch.full((4096,), float(step))
            writer.add(Call(CallSite(step, "m"), "Linear", None, step), {"output": values})
            writer.flush()
            step += 1
            time.sleep(0.01)


def fork(work: object, *arguments: object) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work(*arguments)  # type: ignore[operator]
            code = 0
        finally:
            os._exit(code)
    return child


def run_world(url: str, victim: int) -> None:
    progress, written = os.pipe()
    children = {}
    for process in range(PROCESSES):
        pipe = written if process == victim else os.open(os.devnull, os.O_WRONLY)
        children[process] = fork(write_ranks, url, process, pipe)
    os.close(written)
    if victim >= 0:
        for _ in range(STEPS - 1):
            os.read(progress, 1)
        os.kill(children[victim], signal.SIGKILL)
    for process, child in children.items():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == (-signal.SIGKILL if process == victim else 0), (process, code)


def kill_writers(location: str, count: int) -> None:
    for number in range(count):
        child = fork(write_without_end, f"{location}/{number}")
        time.sleep(random.uniform(0, LONGEST_LIFE_SECONDS))  # noqa: S311 - no secret
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "world":
        run_world(sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else -1)
    else:
        kill_writers(sys.argv[2], int(sys.argv[3]))
