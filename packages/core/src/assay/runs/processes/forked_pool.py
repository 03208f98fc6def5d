"""Forked copies of this process, one for each core, that apply a function to many items.

The copies share loaded data, such as the indexes of dumps. Each has one thread of torch.
"""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from tempfile import TemporaryFile
from typing import TypeVar

import torch

from assay.errors import MachineError
from assay.progress import SilentProgress
from assay.runs.processes.mapped_pickles import dump_mapped, load_mapped

Item = TypeVar("Item")
Result = TypeVar("Result")

_PARENT_SECONDS = 1.0


def map_forked(
    function: Callable[[Item], Result], items: Sequence[Item]
) -> Iterator[tuple[int, Result]]:
    """Yield number and result of each item as soon as it is ready. A file is open for each item.

    With one thread of torch, or fewer items than threads, no process is forked.
    Raises: as `function`; MachineError if a process was killed.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(TemporaryFile()) for _ in items]

        def work(number: int) -> None:
            dump_mapped(function(items[number]), files[number])

        for number in _run(work, len(items)):
            yield number, load_mapped(files[number])
            files[number].close()  # the mapping stays


def _run(work: Callable[[int], None], count: int) -> Iterator[int]:
    """Call `work` with the numbers up to `count`. Yields each number after its call."""
    num_processes = torch.get_num_threads()
    if num_processes == 1 or count < num_processes:
        for number in range(count):
            work(number)
            yield number
        return
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(num_processes, context, _begin, (work,))
    try:
        for future in as_completed([pool.submit(_work, number) for number in range(count)]):
            yield future.result()
    except BrokenProcessPool as error:
        raise MachineError(
            "one of the processes that compare was killed: out of memory?"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


# The function of a pool process. Only module-level functions can be pickled, so it is inherited.
_inherited: list[Callable[[int], None]] = []


def _begin(work: Callable[[int], None]) -> None:
    """Prepare a new process of the pool."""
    _inherited.append(work)
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_SECONDS)
    os._exit(1)


def _work(number: int) -> int:
    with SilentProgress().step(""):
        _inherited[-1](number)
    return number
