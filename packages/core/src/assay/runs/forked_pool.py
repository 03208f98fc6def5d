"""Forked copies of this process, one for each core, that apply a function to many items.

The copies share what is loaded, such as the indexes of dumps. Each has one thread of torch.
"""

import io
import os
import pickle
import select
import signal
import struct
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch

from assay.errors import AssayError, MachineError
from assay.progress import SilentProgress

Item = TypeVar("Item")
Result = TypeVar("Result")

_NUMBER = struct.Struct("<i")
_HEAD = struct.Struct("<q")
# A pipe holds 64 KiB: the numbers of so many items are written before anything reads them.
_MOST_ITEMS = (1 << 16) // _NUMBER.size


def map_forked(
    function: Callable[[Item], Result], items: Sequence[Item]
) -> Iterator[tuple[int, Result]]:
    """Yield number and result of each item, as they are ready.

    With one thread of torch, or fewer items than threads, this process does all itself.
    Raises: what `function` raises; MachineError with the process id and the signal if a process was killed.
    """
    num_processes = torch.get_num_threads()
    if num_processes == 1 or not num_processes <= len(items) <= _MOST_ITEMS:
        for number, item in enumerate(items):
            yield number, function(item)
        return
    numbers, source = os.pipe()
    os.write(source, b"".join(map(_NUMBER.pack, range(len(items)))))
    os.close(source)
    workers: dict[int, int] = {}
    try:
        for _ in range(num_processes):
            pid, output = _fork(function, items, numbers)
            workers[output] = pid
        yield from _receive(workers)
    finally:
        os.close(numbers)
        for output, pid in workers.items():
            os.close(output)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _receive(workers: dict[int, int]) -> Iterator[tuple[int, Any]]:
    """Yield the results of all workers, by the descriptor that each writes to, until all have ended."""
    while workers:
        for output in select.select(list(workers), [], [])[0]:
            message = _read_message(output)
            if message is not None:
                number, is_error, value = pickle.loads(message)  # noqa: S301 - of this process's copy
                if is_error:
                    raise value
                yield number, value
                continue
            os.close(output)
            pid = workers.pop(output)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if status:
                how = f"by signal {-status}" if status < 0 else f"with exit code {status}"
                raise MachineError(
                    f"process {pid}, one of those that compare, ended {how}"
                    + (": out of memory?" if status == -signal.SIGKILL else "")
                )


def _fork(
    function: Callable[[Item], Result], items: Sequence[Item], numbers: int
) -> tuple[int, int]:
    """Start a copy of this process. Returns its id, and the descriptor of its results."""
    output, sink = os.pipe()
    pid = os.fork()
    if pid:
        os.close(sink)
        return pid, output
    status = 1
    try:
        os.close(output)
        torch.set_num_threads(1)
        with SilentProgress().step(""):
            _work(function, items, numbers, sink)
        status = 0
    except (BrokenPipeError, KeyboardInterrupt):
        pass
    finally:
        os._exit(status)  # nothing that this process has opened may be closed twice


def _work(
    function: Callable[[Item], Result], items: Sequence[Item], numbers: int, sink: int
) -> None:
    while taken := os.read(numbers, _NUMBER.size):
        (number,) = _NUMBER.unpack(taken)
        try:
            message = _dump((number, False, function(items[number])))
        except AssayError as error:
            message = _dump((number, True, error))
        except Exception:  # noqa: BLE001 - any: it is raised in the parent
            message = _dump((number, True, RuntimeError(traceback.format_exc())))
        _write(sink, _HEAD.pack(len(message)))
        _write(sink, message)


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays, which takes a tenth of the time."""

    def reducer_override(self, value: object) -> Any:  # noqa: ANN401 - as pickle has it
        if isinstance(value, torch.Tensor) and value.dtype in (torch.float64, torch.int64):
            return torch.from_numpy, (value.contiguous().numpy(),)
        return NotImplemented


def _dump(value: object) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream, pickle.HIGHEST_PROTOCOL).dump(value)
    return stream.getvalue()


def _write(sink: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(sink, view) :]


def _read_message(source: int) -> bytes | None:
    """Read one message; None if the process that writes has ended, in its middle or not."""
    head = _read(source, _HEAD.size)
    return _read(source, _HEAD.unpack(head)[0]) if head is not None else None


def _read(source: int, size: int) -> bytes | None:
    parts = []
    while size:
        part = os.read(source, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
