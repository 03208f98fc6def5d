"""Read pickled checkpoints (`pytorch_model.bin`) without running code from them."""

import pickle
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from assay.files import UnreadableFileError, open_file
from assay.files.safetensors import DTYPES
from assay.models.weight_files.hashing import StoredWeight, hash_tensor
from assay.models.weight_files.reading import assign_tensors, weight_files
from assay.progress import counted

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
