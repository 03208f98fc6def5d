"""Pickled values whose tensors stay in a file that is mapped into memory.

The system can drop the pages of a mapped tensor and read them again.
"""

import io
import mmap
import pickle
from typing import IO, Any

import torch

_ALIGNMENT = 64  # a cache line
_DTYPES = (torch.float64, torch.float32, torch.int64, torch.bool)


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
