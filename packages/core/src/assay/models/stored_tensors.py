"""Tensors of weight files: memory-mapped safetensors, and pickles (`pytorch_model.bin`) whose code does not run."""

import pickle
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from assay.files import UnreadableFileError, open_file
from assay.files.safetensors import DTYPES, HeaderEntry
from assay.foreign_text import shorten
from assay.models.weight_files import (
    StoredWeight,
    assign_tensors,
    hash_tensor,
    read_headers,
    read_tensors,
    weight_files,
)
from assay.progress import counted


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


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Return True if both hold the same bits: a NaN equals itself, and -0 differs from 0."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    sides = [one.detach().contiguous().reshape(-1).view(torch.uint8) for one in (actual, expected)]
    # 64-bit integers compare fastest. A tensor of a mapped file may begin at any byte.
    if all(one.numel() % 8 == 0 and one.storage_offset() % 8 == 0 for one in sides):
        sides = [one.view(torch.int64) for one in sides]
    return torch.equal(*sides)


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
    return same_bits(
        *(map_tensor(part) if isinstance(part, HeaderEntry) else part for part in (one, other))
    )


def _view(data: Tensor, stored: HeaderEntry) -> Tensor:
    dtype: torch.dtype = getattr(torch, dtype_of(stored))
    if stored.start % dtype.itemsize:
        data = data.clone()  # the format allows addresses that torch does not
    return data.view(dtype).reshape(stored.shape)


# The safetensors names of the dtypes accepted in pickled weights.
_NAMES: dict[torch.dtype, str] = {
    getattr(torch, dtype): name
    for name, (dtype, _) in DTYPES.items()
    if name not in ("C64", "U64", "U32", "U16", "F8_E8M0")
}

_STORAGE = "data/0"


@dataclass(frozen=True, slots=True)
class _Layout:
    """Layout of the values in a file of one tensor."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    storage_bytes: int


# Keyed by pickle and byte order. A dump has thousands of files but only a few dozen different pickles.
_LAYOUTS: dict[tuple[bytes, bytes], _Layout] = {}
_MOST_LAYOUTS = 4096


def load_objects(file: Path) -> object:
    """Map a file of `torch.save` that holds only tensors and plain values.

    Raises: UnreadableFileError for any other content, and for a tensor larger than its storage.
    """
    try:
        with open_file(file):  # refuses a FIFO, on which torch would block
            return _load_objects(file)
    except UnreadableFileError:
        raise
    except pickle.UnpicklingError:
        # torch's own message advises unsafe unpickling.
        problem = "it holds objects other than tensors, which assay does not unpickle"
        raise UnreadableFileError.of(file, problem) from None
    except Exception as error:  # noqa: BLE001 - any: damaged pickles and archives
        # torch's own messages advise other ways of loading.
        problem = f"it is not a file of torch.save, or it is cut off ({type(error).__name__})"
        raise UnreadableFileError.of(file, problem) from None


def _load_objects(file: Path) -> object:
    """Read a file as `torch.load` does, but five times faster after a file with the same pickle."""
    path = str(file)
    archive: Any = torch._C.PyTorchFileReader(path)  # noqa: SLF001 - `torch.load` uses it too
    if not (archive.has_record(_STORAGE) and archive.has_record("byteorder")):
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    key = archive.get_record("data.pkl"), archive.get_record("byteorder")
    size = archive.get_record_size(_STORAGE)
    layout = _LAYOUTS.get(key)
    if layout is not None and layout.storage_bytes == size:
        start = archive.get_record_offset(_STORAGE)
        storage = torch.UntypedStorage.from_file(path, False, start + size)  # noqa: FBT003 - private
        empty = torch.empty(0, dtype=layout.dtype)
        return empty.set_(storage[start:], layout.offset, layout.shape, layout.stride)
    content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    if _is_plain(content) and len(_LAYOUTS) < _MOST_LAYOUTS:
        _LAYOUTS[key] = _Layout(
            content.dtype, content.shape, content.stride(), int(content.storage_offset()), size
        )
    return content


def _is_plain(content: object) -> TypeGuard[Tensor]:
    return (
        type(content) is Tensor
        and content.layout is torch.strided
        and content.device.type == "cpu"
        and not (content.is_quantized or content.requires_grad or content.is_nested)
        and not (content.is_conj() or content.is_neg() or content.__dict__)
    )


def require_stored(file: Path, name: str, tensor: Tensor) -> Tensor:
    """Return `tensor` detached. Raises: UnreadableFileError unless it is dense and fully stored."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise UnreadableFileError.of(file, f"{name} is a {tensor.layout} of {tensor.dtype}")
    if tensor.is_meta or tensor.nbytes > tensor.untyped_storage().nbytes():
        raise UnreadableFileError.of(file, f"{name} has more elements than are stored")
    return tensor.detach()


def _load_file(file: Path) -> dict[str, Tensor]:
    state = load_objects(file)
    if not isinstance(state, Mapping):
        raise UnreadableFileError.of(
            file, f"it holds a {type(state).__name__} instead of named tensors"
        )
    tensors = {str(key): one for key, one in state.items() if isinstance(one, Tensor)}
    for name, one in tensors.items():
        if one.dtype not in _NAMES:
            raise UnreadableFileError.of(file, f"{name} is a {one.layout} of {one.dtype}")
    return {name: require_stored(file, name, one) for name, one in tensors.items()}


def read_shards(folder: Path) -> dict[Path, dict[str, Tensor]]:
    """Map the tensors in each pickled file of `folder` by name."""
    return {file: _load_file(file) for file in weight_files(folder)}


def read_pickled(folder: Path) -> dict[str, Tensor]:
    """Map the tensors of `folder` by name, each from the file that the index assigns."""
    return assign_tensors(folder, read_shards(folder))[0]


def pickled_dtype(folder: Path) -> str:
    """Return the dtype of most floating-point values in the files of `folder`."""
    counts: Counter[str] = Counter()
    for value in read_pickled(folder).values():
        if value.is_floating_point():
            counts[str(value.dtype).removeprefix("torch.")] += value.numel()
    return counts.most_common(1)[0][0] if counts else "float32"


def pickled_weights(folder: Path) -> dict[str, StoredWeight]:
    """Hash every tensor to the same value as `reading.stored_weights` for a safetensors file."""
    found: dict[str, StoredWeight] = {}
    for name, value in counted("hashes its files", read_pickled(folder).items(), "tensors"):
        dtype = _NAMES[value.dtype]
        found[name] = StoredWeight(dtype, tuple(value.shape), hash_tensor(value, dtype))
    return found
