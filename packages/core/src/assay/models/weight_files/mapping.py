"""Memory-mapped tensors of weight files."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from assay.files import UnreadableFileError, open_file
from assay.files.safetensors import DTYPES, HeaderEntry
from assay.models.weight_files.pickled import read_pickled
from assay.models.weight_files.reading import read_tensors


def dtype_of(stored: HeaderEntry) -> str:
    """Return torch's name of the dtype, such as `bfloat16`; "" for an unknown dtype."""
    return DTYPES.get(stored.dtype, ("",))[0]


def map_tensor(stored: HeaderEntry) -> Tensor:
    """Map one tensor and no other part of its file. Values are read on access.

    Changes to the tensor do not reach the file.
    Raises: UnreadableFileError, naming file and tensor.
    """
    if stored.dtype not in DTYPES:
        problem = f"{stored.name} has {stored.size_bytes:,} bytes of dtype {stored.dtype}"
        raise UnreadableFileError.of(stored.file, f"{problem}, which assay cannot read")
    if not stored.size_bytes:
        return _view(torch.empty(0, dtype=torch.uint8), stored)
    try:
        with open_file(stored.file) as file:
            data = np.memmap(file, np.uint8, "c", stored.start, (stored.size_bytes,))
    except ValueError as error:
        raise UnreadableFileError.of(stored.file, f"{stored.name}: {error}") from None
    return _view(torch.from_numpy(data), stored)


def map_folder(folder: Path) -> dict[str, Tensor]:
    """Map all tensors of a model folder by name, with one mapping per file.

    A large model has more tensors than Linux allows mappings. Tensors of an unknown dtype are left out.
    """
    tensors = read_tensors(folder)
    if tensors is None:
        return read_pickled(folder)
    files = {
        file: torch.from_numpy(np.memmap(file, np.uint8, "c"))
        for file in {one.file for one in tensors}
    }
    return {
        one.name: _view(files[one.file][one.start : one.end], one)
        for one in tensors
        if one.dtype in DTYPES
    }


def _view(data: Tensor, stored: HeaderEntry) -> Tensor:
    dtype: torch.dtype = getattr(torch, dtype_of(stored))
    if stored.start % dtype.itemsize:
        data = data.clone()  # the format allows addresses that torch does not
    return data.view(dtype).reshape(stored.shape)
