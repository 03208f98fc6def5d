"""Read, check and hash safetensors weight files without torch.

Source of the layout (8 bytes of header length, little endian; a JSON header; the data): the README
of the safetensors project.
"""

import mmap
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import xxhash

from assay.errors import UsageError
from assay.files import UnreadableFileError, open_file, parse_json, read_json_object
from assay.foreign_text import shorten
from assay.models.sources import require_inside
from assay.models.weight_files.hashing import StoredWeight, combine_hashes, hash_values
from assay.progress import subtask

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_TORCH_SINGLE = "pytorch_model.bin"
_TORCH_INDEX = "pytorch_model.bin.index.json"
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself

# The torch name and the item size of each dtype. Dtypes not listed may pack several values into a byte.
DTYPES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1), "F8_E8M0": ("float8_e8m0fnu", 1),
    "I64": ("int64", 8), "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1),
    "U64": ("uint64", 8), "U32": ("uint32", 4), "U16": ("uint16", 2), "U8": ("uint8", 1),
    "BOOL": ("bool", 1), "C64": ("complex64", 8),
}  # fmt: skip

# Floating dtypes in which models store unquantized weights.
_WEIGHT_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Header entry of one tensor in a safetensors file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    """First byte of the values, counted from the start of the file."""
    end: int

    @property
    def num_elements(self) -> int:
        """Multiply the sizes of all dims."""
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Count the bytes of the values in the file."""
        return self.end - self.start


def weight_files(folder: Path) -> list[Path]:
    """List the existing weight files of a folder; prefer safetensors to pickled files.

    Raises: UsageError if the folder has no weight file or lacks a shard that its index names.
    """
    for single, index in ((_SINGLE, _INDEX), (_TORCH_SINGLE, _TORCH_INDEX)):
        if (folder / single).is_file():
            return [require_inside(folder / single)]
        if (folder / index).is_file():
            shards = read_json_object(folder / index).get("weight_map")
            if not isinstance(shards, dict) or not all(isinstance(v, str) for v in shards.values()):
                raise UsageError(f"{folder / index} has no weight_map")
            files = [folder / name for name in sorted(set(shards.values()))]
            if not files:
                raise UsageError(f"{folder / index} has no weight_map")
            names = {path.name for path in folder.iterdir() if path.is_file()}
            for file in files:
                if file.parent != folder or file.name not in names:
                    raise UsageError(
                        f"{folder / index} names {shorten(file.name)}, which is not there"
                    )
                require_inside(file)
            return files
    raise UsageError(f"model folder {folder} has no weights: neither {_SINGLE} nor {_INDEX}")


def read_tensors(folder: Path) -> list[TensorEntry] | None:
    """Read the headers of the safetensors files in `folder`; return None if its weights are pickled.

    Raises: UsageError, naming file and key, for a truncated or contradictory file.
    """
    files = weight_files(folder)
    if files[0].suffix != ".safetensors":
        return None
    tensors = [tensor for file in files for tensor in read_header(file)]
    if (folder / _INDEX).is_file() and files != [folder / _SINGLE]:
        held = {(tensor.name, tensor.file.name) for tensor in tensors}
        for name, file_name in read_json_object(folder / _INDEX)["weight_map"].items():
            if (name, file_name) not in held:
                problem = f"lacks {shorten(name)}, which {_INDEX} promises"
                raise UsageError(f"{folder / shorten(file_name)} {problem}")
    return tensors


def read_header(file: Path) -> list[TensorEntry]:
    """Read the header of a safetensors file.

    Raises: UnreadableFileError, naming file and key, if the file is truncated or contradicts itself.
    """
    with open_file(file) as stream:
        size = file.stat().st_size
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
            problem = "is truncated or no safetensors file: its header is cut off"
            raise UnreadableFileError(f"{file} {problem}")
        try:
            header = parse_json(stream.read(length).decode(), f"{file}, safetensors header")
            data_start = _LENGTH_BYTES + length
            entries = [
                TensorEntry(
                    name,
                    file,
                    str(entry["dtype"]),
                    tuple(_count(dim) for dim in entry["shape"]),
                    data_start + _count(entry["data_offsets"][0]),
                    data_start + _count(entry["data_offsets"][1]),
                )
                for name, entry in header.items()
                if name != "__metadata__"
            ]
        except UnreadableFileError:
            raise
        except UnicodeDecodeError as error:
            problem = f"its safetensors header is not UTF-8 at byte {error.start:,}"
            raise UnreadableFileError.of(file, problem) from None
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise UnreadableFileError.of(file, f"broken safetensors header: {error!r}") from None
    for tensor in entries:
        _, item_bytes = DTYPES.get(tensor.dtype, ("", None))
        if item_bytes is not None and tensor.num_elements * item_bytes != tensor.size_bytes:
            problem = f"{tensor.name} has {tensor.size_bytes:,} bytes for {tensor.num_elements:,}"
            raise UnreadableFileError.of(file, f"{problem} values of {tensor.dtype}")
    for tensor in sorted(entries, key=lambda tensor: tensor.end):
        if tensor.end > size or tensor.start > tensor.end or tensor.start < data_start:
            raise UnreadableFileError(
                f"{file} is truncated: {shorten(tensor.name)} ends at byte {tensor.end:,},"
                f" the file has {size:,}"
            )
    return entries


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is neither a size nor an offset")
    return value


def checkpoint_dtype(tensors: list[TensorEntry]) -> str:
    """Return the dtype of most floating-point values."""
    counts: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.dtype in _WEIGHT_DTYPES:
            counts[DTYPES[tensor.dtype][0]] += tensor.num_elements
    return counts.most_common(1)[0][0] if counts else "float32"


def holds_float64(tensors: list[TensorEntry]) -> bool:
    """Return True if any tensor is stored in float64."""
    return any(tensor.dtype == "F64" for tensor in tensors)


def stored_weights(tensors: list[TensorEntry]) -> dict[str, StoredWeight]:
    """Hash the values of every tensor."""
    found: dict[str, StoredWeight] = {}
    with subtask("hashes its files", sum(one.size_bytes for one in tensors) / 1e6, "MB") as task:
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
                        task.advance(one.size_bytes / 1e6)
    return found


def files_hash(files: Mapping[str, Path]) -> str:
    """Combine the hashes of the contents of named files."""
    return combine_hashes(
        {name: xxhash.xxh3_128_hexdigest(path.read_bytes()) for name, path in files.items()}
    )
