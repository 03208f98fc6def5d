"""Find and hash the weight files of a model folder without torch."""

import mmap
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import xxhash

from assay.errors import UsageError
from assay.files import UnreadableFileError, open_file, read_json_object
from assay.files.safetensors import DTYPES, HeaderEntry, read_header
from assay.foreign_text import shorten
from assay.models.gguf_files import GGUF, read_gguf
from assay.models.sources import require_inside
from assay.progress import counted, subtask

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """Dtype, shape and hash of a tensor in a checkpoint."""

    dtype: str
    """Name in the safetensors format, such as "BF16"."""
    shape: tuple[int, ...]
    hash: str
    """Covers dtype, shape and values."""


def hash_values(dtype: str, shape: tuple[int, ...], values: "Buffer") -> str:
    """Hash a tensor's dtype, shape and values with XXH3-128, which is not cryptographic.

    Source: Collet, xxHash fast digest algorithm (the XXH3 family).
    """
    digest = xxhash.xxh3_128(f"{dtype}{list(shape)}".encode())
    digest.update(values)
    return digest.hexdigest()


def hash_tensor(tensor: "torch.Tensor", dtype: str = "") -> str:
    """Hash a tensor's dtype, shape and values; `dtype`: its name in the hash, by default torch's."""
    import torch

    if hasattr(tensor, "__tensor_flatten__"):  # a library's class that holds codes and scales
        names, _ = tensor.__tensor_flatten__()
        return combine_hashes({one: hash_tensor(getattr(tensor, one)) for one in sorted(names)})
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    name = dtype or str(tensor.dtype).removeprefix("torch.")
    return hash_values(name, tuple(tensor.shape), flat.numpy().data)


def combine_hashes(hashes: Mapping[str, str]) -> str:
    """Combine named hashes into one that does not depend on their order."""
    lines = "".join(f"{name} {hashes[name]}\n" for name in sorted(hashes))
    return xxhash.xxh3_128_hexdigest(lines.encode())


def weight_hashes(model: "torch.nn.Module") -> dict[str, str]:
    """Hash each parameter and buffer; list tied tensors under every name."""
    import torch

    hashes: dict[str, str] = {}
    known: dict[int, str] = {}
    with torch.no_grad():
        tensors = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        for name, tensor in counted("hashes weights", tensors, "tensors"):
            if id(tensor) not in known:
                known[id(tensor)] = hash_tensor(tensor)
            hashes[name] = known[id(tensor)]
    return hashes


_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_TORCH_SINGLE = "pytorch_model.bin"
_TORCH_INDEX = "pytorch_model.bin.index.json"

Stored = TypeVar("Stored")

LFS_POINTER = "version https://git-lfs.github.com/spec/"

# Floating dtypes in which models store unquantized weights.
_WEIGHT_DTYPES = ("F64", "F32", "F16", "BF16")


def weight_files(folder: Path) -> list[Path]:
    """List the existing weight files of a folder; prefer safetensors to pickled files.

    Raises: UnreadableFileError if the folder has no weight file, lacks a shard that its index names, or
        holds a pointer of Git LFS in place of one.
    """
    if (folder / GGUF).is_file():
        return [folder / GGUF]
    for single, index in ((_SINGLE, _INDEX), (_TORCH_SINGLE, _TORCH_INDEX)):
        if (folder / single).is_file():
            return [_refuse_pointer(require_inside(folder / single))]
        if (folder / index).is_file():
            files = [folder / name for name in sorted(set(_read_index(folder / index).values()))]
            names = {path.name for path in folder.iterdir() if path.is_file()}
            for file in files:
                if file.parent != folder or file.name not in names:
                    raise UnreadableFileError(
                        f"{folder / index} names {shorten(file.name)}, which is not there; {_COPY_AGAIN}"
                    )
                _refuse_pointer(require_inside(file))
            return files
    raise UnreadableFileError(
        f"model folder {folder} has no weights: neither {_SINGLE} nor {_INDEX}; {_COPY_AGAIN}"
    )


_COPY_AGAIN = "copy or download the model again"


def _refuse_pointer(file: Path) -> Path:
    """Return `file`. Raises: UnreadableFileError if git left a pointer of Git LFS in its place."""
    with open_file(file) as stream:
        if stream.read(len(LFS_POINTER)) == LFS_POINTER.encode():
            problem = "is a pointer of Git LFS, not the weights; to load them: git lfs pull"
            raise UnreadableFileError(f"{file} {problem}")
    return file


def _read_index(index: Path) -> dict[str, str]:
    shards = read_json_object(index).get("weight_map")
    is_map = isinstance(shards, dict) and all(isinstance(one, str) for one in shards.values())
    if not shards or not is_map:
        raise UsageError(f"{index} has no weight_map")
    return dict(shards)


def assign_tensors(
    folder: Path, shards: Mapping[Path, Mapping[str, Stored]]
) -> tuple[dict[str, Stored], list[tuple[str, Path]]]:
    """Take each tensor from the shard that the index of `folder` assigns it to.

    shards: tensors by name, for each of `weight_files(folder)`.
    Returns: the tensors, and name and shard of the copies in other shards.
    Raises: UsageError if a shard lacks a tensor that the index promises, or if two shards hold a
        tensor that the index does not name.
    """
    files = list(shards)
    if files[0].name in (_SINGLE, _TORCH_SINGLE, GGUF):
        return dict(shards[files[0]]), []
    index = folder / (_INDEX if files[0].suffix == ".safetensors" else _TORCH_INDEX)
    places = _read_index(index)
    found, copies = {}, []
    for name, file_name in places.items():
        if name not in shards[folder / file_name]:
            problem = f"lacks {shorten(name)}, which {index.name} promises"
            raise UsageError(f"{folder / shorten(file_name)} {problem}")
    for file, tensors in shards.items():
        for name, tensor in tensors.items():
            if name in places and places[name] != file.name:
                copies.append((name, file))
            elif name in found:
                raise UsageError(f"{index} does not name {shorten(name)}, which two shards hold")
            else:
                found[name] = tensor
    return found, copies


def read_headers(folder: Path) -> dict[Path, dict[str, HeaderEntry]] | None:
    """Read the headers of all safetensors files in `folder`; return None if its weights are pickled.

    Raises: UsageError, naming file and key, for a truncated or contradictory file.
    """
    files = weight_files(folder)
    if files[0].name == GGUF:
        return {files[0]: dict(read_gguf(files[0]).tensors)}
    if files[0].suffix != ".safetensors":
        return None
    return {file: {tensor.name: tensor for tensor in read_header(file)} for file in files}


def read_tensors(folder: Path) -> list[HeaderEntry] | None:
    """List the tensors that the index assigns; return None if the weights are pickled.

    Raises: UsageError, naming file and key, for a truncated or contradictory file.
    """
    headers = read_headers(folder)
    return None if headers is None else [*assign_tensors(folder, headers)[0].values()]


def checkpoint_dtype(tensors: list[HeaderEntry]) -> str:
    """Return the dtype of most floating-point values."""
    counts: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.dtype in _WEIGHT_DTYPES:
            counts[DTYPES[tensor.dtype][0]] += tensor.num_elements
    return counts.most_common(1)[0][0] if counts else "float32"


def holds_float64(tensors: list[HeaderEntry]) -> bool:
    """Return True if any tensor is stored in float64."""
    return any(tensor.dtype == "F64" for tensor in tensors)


def stored_weights(tensors: list[HeaderEntry]) -> dict[str, StoredWeight]:
    """Hash the values of every tensor."""
    found: dict[str, StoredWeight] = {}
    with subtask("hashing its files", sum(one.size_bytes for one in tensors), "bytes") as task:
        for file in sorted({tensor.file for tensor in tensors}):
            with (
                file.open("rb") as stream,
                mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data,
            ):
                for one in tensors:
                    if one.file == file:
                        with memoryview(data)[one.start : one.end] as values:
                            hashed = hash_values(one.dtype, one.shape, values)
                        found[one.name] = StoredWeight(one.dtype, one.shape, hashed)
                        task.advance(one.size_bytes)
    return found
