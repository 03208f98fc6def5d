"""Read the headers of safetensors files without torch.

Source: the README of huggingface/safetensors: 8 bytes little-endian length of the header, a JSON header
that may be padded with spaces, then the data without holes.
"""

import os
import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from assay.files.reading import UnreadableFileError, open_file, parse_json
from assay.foreign_text import shorten

LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself

# The torch name and the item size of each dtype. Dtypes not listed may pack several values into a byte.
DTYPES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1), "F8_E8M0": ("float8_e8m0fnu", 1),
    "I64": ("int64", 8), "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1),
    "U64": ("uint64", 8), "U32": ("uint32", 4), "U16": ("uint16", 2), "U8": ("uint8", 1),
    "BOOL": ("bool", 1), "C64": ("complex64", 8),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class HeaderEntry:
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


def read_header(file: Path) -> list[HeaderEntry]:
    """Read the entries of a safetensors file. Raises: as `read_whole_header`."""
    return read_whole_header(file)[0]


def read_whole_header(file: Path) -> tuple[list[HeaderEntry], dict[str, Any]]:
    """Read the entries and the metadata of a safetensors file.

    Raises: UnreadableFileError, naming file and key, if the file is truncated or contradicts itself.
    """
    entries, metadata, size = read_cut_header(file)
    for entry in entries:
        if entry.end > size:
            raise UnreadableFileError(
                f"{file} is truncated: {shorten(entry.name)} ends at byte {entry.end:,}, the file has"
                f" {size:,}"
            )
    return entries, metadata


def read_cut_header(file: Path) -> tuple[list[HeaderEntry], dict[str, Any], int]:
    """Read entries, metadata, and the size of a file that may end before its last values.

    Raises: as `read_whole_header`, but not for truncated values.
    """
    with open_file(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        if length > min(size - LENGTH_BYTES, _MAX_HEADER_BYTES):
            problem = "is truncated or no safetensors file: its header is cut off"
            raise UnreadableFileError(f"{file} {problem}")
        content = stream.read(length)
    try:
        header = parse_json(content.decode(), f"{file}, safetensors header")
    except UnicodeDecodeError as error:
        problem = f"its safetensors header is not UTF-8 at byte {error.start:,}"
        raise UnreadableFileError.of(file, problem) from None
    metadata = header.pop("__metadata__", {}) if isinstance(header, dict) else None
    if not isinstance(metadata, dict):
        raise UnreadableFileError.of(file, "broken safetensors header: no table of tensors")
    start = LENGTH_BYTES + length
    entries = [_parse_entry(file, name, entry, start) for name, entry in header.items()]
    return entries, metadata, size


def _parse_entry(file: Path, name: str, entry: Any, data_start: int) -> HeaderEntry:  # noqa: ANN401 - JSON
    try:
        begin, end = (data_start + _count(one) for one in entry["data_offsets"])
        shape = tuple(_count(dim) for dim in entry["shape"])
        _count(prod(shape))
        tensor = HeaderEntry(name, file, str(entry["dtype"]), shape, begin, end)
    except (ValueError, KeyError, TypeError) as error:
        problem = f"broken safetensors header: {shorten(name)}: {error!r}"
        raise UnreadableFileError.of(file, problem) from None
    _, item_bytes = DTYPES.get(tensor.dtype, ("", None))
    if item_bytes is not None and tensor.num_elements * item_bytes != tensor.size_bytes:
        problem = f"{name} has {tensor.size_bytes:,} bytes for {tensor.num_elements:,}"
        raise UnreadableFileError.of(file, f"{problem} values of {tensor.dtype}")
    if begin > end:
        raise UnreadableFileError.of(file, f"broken safetensors header: {shorten(name)} ends first")
    return tensor


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value <= sys.maxsize:
        raise ValueError(f"{shorten(value)} is neither a size nor an offset")
    return value
