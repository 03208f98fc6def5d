"""Bodies that the tests of this folder run on ranks. Tests find lines by the comment at their end."""

import ctypes
import functools
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import unittest.mock
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from assay.errors import UsageError
from assay.launch import Rank, RankSkipped, World, call
from assay.progress import Progress

BAD = 1


def launch(
    body: Callable[..., Any], world: World, *arguments: object, folder: Path | None = None
) -> list[Any]:
    """Call `body(rank, *arguments)` on every rank of `world`. folder: for the logs."""
    return call(run_body, (body, arguments), world=world, folder=folder)


def run_body(
    request: tuple[Callable[..., object], tuple[object, ...]], _: Progress, rank: Rank
) -> object:
    __tracebackhide__ = True
    body, arguments = request
    return body(rank, *arguments)


def sum_of_ranks(rank: Rank, factor: float = 1.0) -> float:
    value = torch.tensor(factor * rank.number)
    dist.all_reduce(value)  # waits
    return float(value)


def linger(rank: Rank) -> None:
    """Make rank 1 hang after its body, in the end of the process group."""
    if rank.number == BAD:
        wait = functools.partial(time.sleep, 600)
        unittest.mock.patch.object(dist, "destroy_process_group", wait).start()


def place(rank: Rank) -> dict[str, object]:
    axes = {axis: rank.mesh.get_local_rank(axis) for axis in rank.axes}
    sums = {}
    for axis in rank.axes:
        value = torch.tensor(rank.number)
        dist.all_reduce(value, group=rank.mesh.get_group(axis))
        sums[axis] = int(value)
    return {
        "number": (rank.number, dist.get_rank(), os.environ["RANK"], os.environ["LOCAL_RANK"]),
        "size": (rank.size, dist.get_world_size(), os.environ["WORLD_SIZE"]),
        "mesh": axes,
        "sums": sums,
        "device": rank.device.name,
        "backend": dist.get_backend(),
        "threads": torch.get_num_threads(),
    }


def sharded_sum(rank: Rank) -> float:
    tensor = distribute_tensor(torch.arange(8.0), rank.mesh["tp"], [Shard(0)])
    assert tensor.to_local().shape == (4,)
    return float(tensor.full_tensor().sum())


def surroundings(_rank: Rank) -> dict[str, object]:
    return {
        "variable": os.environ.get("ASSAY_TEST_VARIABLE"),
        "folder": str(Path.cwd()),
        "path": list(sys.path),
        "pid": os.getpid(),
        "group": os.getpgrp(),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "devices": torch.accelerator.is_available() and torch.get_device_module().is_initialized(),
        "input": sys.stdin.read(),
    }


def change_global_state(_rank: Rank) -> object:
    before = getattr(torch, "changed_by_a_test", None), os.environ.get("ASSAY_CHANGED_BY_A_TEST")
    torch.changed_by_a_test = True  # type: ignore[attr-defined] # that is what is tested
    os.environ["ASSAY_CHANGED_BY_A_TEST"] = "1"
    return before


def draw(_rank: Rank) -> tuple[float, float]:
    return random.random(), float(np.random.random())  # noqa: NPY002, S311 - what models draw from


def show_modules(_rank: Rank, name: str) -> bool:
    return name in sys.modules


def print_number(rank: Rank) -> None:
    sys.stdout.write(f"out of {rank.number}\n")
    os.write(2, b"err\n")


def print_lines(_rank: Rank) -> None:
    for number in range(1, 101):
        sys.stdout.write(f"line {number} of 100\n")


def start_world(_rank: Rank) -> None:
    launch(sum_of_ranks, World({"dp": 2}))


def sleep_for_ever(_rank: Rank, started: Path) -> NoReturn:
    leave_a_child(_rank, started)
    while True:
        time.sleep(60)


def leave_a_child(rank: Rank, folder: Path) -> None:
    """Start a process that does not end, and write both process ids into `folder`."""
    child = subprocess.Popen(["sleep", "1000"])
    note = folder / f"{rank.number}.tmp"
    note.write_text(f"{os.getpid()} {child.pid}")
    note.rename(folder / f"{rank.number}.pids")


def _raise_boom() -> NoReturn:
    raise ValueError("boom")  # raises


def _loop() -> None:
    sum(itertools.repeat(0))  # loops


def _loop_in_c() -> None:
    ctypes.PyDLL(None).usleep(60_000_000)  # holds the interpreter


def _print_much() -> None:
    for _ in range(100_000):
        sys.stdout.write(f"{'x' * 99}\n")
    sys.stdout.write("the last line\n")
    _raise_boom()


def _exit_with_others() -> NoReturn:
    thread = threading.Thread(target=time.sleep, args=(60,))
    thread.start()
    sys.exit(0)


def _print_and_die() -> None:
    print("the last words")  # noqa: T201 - through the interpreter's own buffer
    os.kill(os.getpid(), signal.SIGKILL)


def _hang_up_and_die() -> None:
    """Close the connections 0.4 s before the death of the process can be detected."""
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError), socket.socket(fileno=os.dup(int(link.name))) as connection:
            if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                connection.shutdown(socket.SHUT_RDWR)
    time.sleep(0.4)
    os.kill(os.getpid(), signal.SIGKILL)


def _skip() -> NoReturn:
    raise RankSkipped("no card")


def _refuse() -> NoReturn:
    raise UsageError("no such model: 'x'")


FAULTS: dict[str, Callable[[], object]] = {
    "raise": _raise_boom,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "print-and-die": _print_and_die,
    "hang-up-and-die": _hang_up_and_die,
    "abort": os.abort,
    "return-early": lambda: None,
    "sleep": lambda: time.sleep(1000),  # sleeps
    "loop": _loop,
    "loop-in-c": _loop_in_c,
    "exit": lambda: os._exit(0),
    "exit-3": lambda: os._exit(3),
    "sys-exit": lambda: sys.exit(0),
    "sys-exit-thread": _exit_with_others,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "skip": _skip,
    "print": _print_much,
    "usage": _refuse,
}


def fail(rank: Rank, folder: Path, fault: str) -> None:
    """Rank 1 does `fault`; the others wait for it in a collective."""
    leave_a_child(rank, folder)
    dist.barrier()
    if rank.number == BAD:
        FAULTS[fault]()
        return
    sum_of_ranks(rank)


def fail_alone(rank: Rank, folder: Path, fault: str) -> None:
    """Rank 1 does `fault` while no other rank waits for it."""
    leave_a_child(rank, folder)
    sum_of_ranks(rank)
    if rank.number == BAD:
        FAULTS[fault]()


def fail_at_the_end(rank: Rank, folder: Path) -> None:
    """Rank 1 aborts after its body has returned."""
    leave_a_child(rank, folder)
    if rank.number == BAD:
        unittest.mock.patch.object(dist, "destroy_process_group", os.abort).start()


def skip_all(_rank: Rank, folder: Path) -> None:
    leave_a_child(_rank, folder)
    raise RankSkipped("no card")


def raise_two(rank: Rank) -> None:
    """Every rank raises, rank 1 first."""
    if rank.number == 0:
        time.sleep(0.05)
    raise ValueError(f"of rank {rank.number}")
