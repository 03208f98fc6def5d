"""Memory-mapped tensors of weight files."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from assay.files import UnreadableFileError, open_file
from assay.files.safetensors import DTYPES, HeaderEntry
from assay.foreign_text import shorten
from assay.models.weight_files.pickled import read_pickled, read_shards
from assay.models.weight_files.reading import assign_tensors, read_headers, read_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping


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


def describe_stale_copies(folder: Path) -> list[str]:
    """Describe copies of tensors whose values differ from those that the index assigns."""
    headers = read_headers(folder)
    shards: Mapping[Path, Mapping[str, HeaderEntry | Tensor]] = headers or read_shards(folder)
    assigned, copies = assign_tensors(folder, shards)
    return [
        f"{file.name} holds another {shorten(name)} than the one that the index assigns"
        for name, file in copies
        if not _is_equal(shards[file][name], assigned[name])
    ]


def _is_equal(one: HeaderEntry | Tensor, other: HeaderEntry | Tensor) -> bool:
    values = [map_tensor(part) if isinstance(part, HeaderEntry) else part for part in (one, other)]
    left, right = (part.contiguous().reshape(-1).view(torch.uint8) for part in values)
    same = (values[0].shape, values[0].dtype) == (values[1].shape, values[1].dtype)
    return same and torch.equal(left, right)


def _view(data: Tensor, stored: HeaderEntry) -> Tensor:
    dtype: torch.dtype = getattr(torch, dtype_of(stored))
    if stored.start % dtype.itemsize:
        data = data.clone()  # the format allows addresses that torch does not
    return data.view(dtype).reshape(stored.shape)
