"""Forked copies of this process, one for each core, that apply a function to many items.

The copies share loaded data, such as the indexes of dumps. Each has one thread of torch. The tensors of
their results stay in files that are mapped into memory: the system can drop the pages of a mapped
tensor and read them again.
"""

import io
import mmap
import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from tempfile import TemporaryFile
from typing import IO, Any, TypeVar

import torch

from assay.errors import MachineError
from assay.progress import SilentProgress

Item = TypeVar("Item")
Result = TypeVar("Result")

_PARENT_SECONDS = 1.0

_ALIGNMENT = 64  # a cache line
_DTYPES = (torch.float64, torch.float32, torch.int64, torch.bool)


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


def dump_mapped(value: object, file: IO[bytes]) -> None:
    """Write `value` to an empty file, for `load_mapped`."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append).dump(value)
    parts = [stream.getbuffer(), *(one.raw() for one in buffers)]
    pickle.dump([part.nbytes for part in parts], file)
    for part in parts:
        file.seek(_align(file.tell()))
        file.write(part)
    file.flush()


def load_mapped(file: IO[bytes]) -> Any:  # noqa: ANN401 - the value that was dumped
    """Return the value in a file that `dump_mapped` wrote. Changes to its tensors do not change the file.

    Only for files of this program: loading a pickle can execute code.
    """
    file.seek(0)
    sizes = pickle.load(file)  # noqa: S301 - see above
    start = file.tell()
    whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    parts = []
    for size in sizes:
        start = _align(start)
        parts.append(whole[start : start + size])
        start += size
    return pickle.loads(parts[0], buffers=parts[1:])  # noqa: S301 - see above


def _align(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


class _Pickler(pickle.Pickler):
    """A pickler that writes tensors as arrays, whose data pickle can separate from the value."""

    def reducer_override(self, value: object) -> Any:  # noqa: ANN401 - as pickle has it
        if isinstance(value, torch.Tensor) and value.dtype in _DTYPES:
            return torch.from_numpy, (value.contiguous().numpy(),)
        return NotImplemented
