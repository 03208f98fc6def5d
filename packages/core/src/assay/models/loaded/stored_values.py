"""The tensors of a model folder's weight files, read raw, one by one."""

import mmap
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from assay.models.weight_files.pickled import read_pickled
from assay.models.weight_files.reading import StoredTensor, read_tensors

# Names of the safetensors format.
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64,
}  # fmt: skip


def map_stored(folder: Path) -> Mapping[str, Tensor]:
    """The stored tensors of `folder` by name; nothing is read before a tensor's values are used.

    The files stay mapped as long as a tensor is referred to. Tensors of a dtype that torch does not
    have are absent.
    """
    tensors = read_tensors(folder)
    if tensors is None:
        return read_pickled(folder)
    files = {file: _map(file) for file in {one.file for one in tensors}}
    return {
        tensor.name: _view(files[tensor.file], tensor)
        for tensor in tensors
        if tensor.dtype in _DTYPES
    }


def _map(file: Path) -> mmap.mmap:
    # Never closed by hand: torch holds the mapping, and no lock on it. Copy on write, as torch warns
    # of memory that cannot be written.
    with file.open("rb") as stream:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)


def _view(data: mmap.mmap, tensor: StoredTensor) -> Tensor:
    dtype = _DTYPES[tensor.dtype]
    if not tensor.num_elements:
        return torch.empty(tensor.shape, dtype=dtype)
    flat = torch.frombuffer(data, dtype=torch.uint8, count=tensor.size_bytes, offset=tensor.start)
    if tensor.start % dtype.itemsize:
        flat = flat.clone()  # the format allows what torch cannot view
    return flat.view(dtype).view(tensor.shape)
