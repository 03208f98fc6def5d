"""The weight files of a model folder: read, checked and hashed without torch.

The safetensors layout (8 bytes of header length, little endian; a JSON header; the data) is
described in the README of the safetensors project.
"""

import mmap
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import mul
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

# Other dtypes may pack several values into a byte.
_ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2,
    "U16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip

# Names of the safetensors format; only floating dtypes that weights are kept in.
_FLOAT_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a weight file; start and end are bytes from the beginning of the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return reduce(mul, self.shape, 1)

    @property
    def size_bytes(self) -> int:
        """Bytes of the values in the file."""
        return self.end - self.start


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a folder, safetensors before pickled ones, checked to exist.

    Raises: UsageError if there is none, or if a shard of the index is absent.
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


def read_tensors(folder: Path) -> list[StoredTensor] | None:
    """Every tensor in the safetensors files of `folder`; None where its weights are pickled.

    Raises: UsageError naming file and key where a file is cut short or contradicts itself.
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


def read_header(file: Path) -> list[StoredTensor]:
    """Every tensor in a safetensors file.

    Raises: UnreadableFileError naming file and key where it is cut short or contradicts itself.
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
                StoredTensor(
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
        item_bytes = _ITEM_BYTES.get(tensor.dtype)
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


def checkpoint_dtype(tensors: list[StoredTensor]) -> str:
    """The dtype that most floating-point values of a checkpoint are kept in."""
    counts: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.dtype in _FLOAT_NAMES:
            counts[_FLOAT_NAMES[tensor.dtype]] += tensor.num_elements
    return counts.most_common(1)[0][0] if counts else "float32"


def holds_float64(tensors: list[StoredTensor]) -> bool:
    """Whether any value of a checkpoint needs more than float32."""
    return any(tensor.dtype == "F64" for tensor in tensors)


def stored_weights(tensors: list[StoredTensor]) -> dict[str, StoredWeight]:
    """Every tensor by its name; all values are read."""
    found: dict[str, StoredWeight] = {}
    with subtask("hashes its files", sum(one.size_bytes for one in tensors) / 1e6, "MB") as task:
        for file in sorted({tensor.file for tensor in tensors}):
            with file.open("rb") as stream, _mapped(stream.fileno()) as data:
                for one in tensors:
                    if one.file == file:
                        with memoryview(data)[one.start : one.end] as values:
                            hashed = hash_values(one.dtype, one.shape, values)
                        found[one.name] = StoredWeight(one.dtype, one.shape, hashed)
                        task.advance(one.size_bytes / 1e6)
    return found


def _mapped(descriptor: int) -> mmap.mmap:
    return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)


def files_hash(files: Mapping[str, Path]) -> str:
    """One hash over the contents of files, by name."""
    return combine_hashes(
        {name: xxhash.xxh3_128_hexdigest(path.read_bytes()) for name, path in files.items()}
    )
