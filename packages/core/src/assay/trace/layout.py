"""A safetensors file, written as a stream and read by memory mapping.

Source: the format description in the README of huggingface/safetensors: 8 bytes little-endian
length of the header, a JSON header that may be padded with spaces, then the data without holes.

The header comes first but is complete last. Space is reserved for it, so that tensors are written
from the memory of the model, without a copy.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

import torch

from assay.trace.errors import TraceError
from assay.trace.files import Folder, OutStream

# torch aligns memory to 64 bytes. For other memory, kernels of some libraries take a path with
# other rounding, and replays must be bitwise equal. Padding is stored as tensors since the format
# forbids holes.
_ALIGNMENT = 64
_PADDING = "__pad__"
_LENGTH_BYTES = 8

# The limit of safetensors, 100 MB.
_LARGEST_HEADER = 100_000_000

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}

# Other dtypes, which not every safetensors reader supports, are stored as bytes with one more
# dimension; this key of the header's metadata holds the dtypes.
_DTYPES_AS_BYTES = "torch_dtypes"


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """The entry of one tensor in a header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """In bytes from the start of the file, as `end`."""
    end: int


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module, such as bfloat16."""
    return str(dtype).removeprefix("torch.")


def dtype_called(name: object) -> torch.dtype:
    """Return the dtype of that name.

    Raises: ValueError if torch has none.
    """
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}")  # noqa: TRY004 - the name is data, not a type
    return dtype


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor in row-major order, without a copy if it is contiguous on the host.

    Raises: TypeError for sparse, quantized and meta tensors.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise TypeError(f"a {tensor.layout} {dtype_name(tensor.dtype)} tensor on {tensor.device}")
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if plain.numel() == 0:
        return memoryview(b"")
    # reshape(-1) would keep a stride of 0, which a single expanded element may have.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data


class ShardWriter:
    """Writes a safetensors file tensor by tensor; `finish` or `discard` ends it."""

    def __init__(self, stream: OutStream, header_bytes: int) -> None:
        self._stream = stream
        self._data_start = -(-header_bytes // _ALIGNMENT) * _ALIGNMENT
        self._entries: list[tuple[str, int]] = []  # text of the header, end of the data
        self._header_length = 0
        self._as_bytes: dict[str, str] = {}

    @property
    def data_bytes(self) -> int:
        """Bytes of data written so far."""
        return self._entries[-1][1] if self._entries else 0

    @property
    def header_bytes(self) -> int:
        """Bytes of the header so far."""
        return _LENGTH_BYTES + len(self._header())

    def has_room_for(self, key: str, tensor: torch.Tensor) -> bool:
        """Return True if the header has space for one more tensor."""
        needed = header_bytes_for(key, tensor)
        if self._as_bytes:
            needed += len(self._metadata())
        return _LENGTH_BYTES + self._header_length + needed <= self._data_start

    def append(self, key: str, tensor: torch.Tensor, data: memoryview) -> None:
        """Write a tensor under `key`. data: its bytes."""
        if padding := -self.data_bytes % _ALIGNMENT:
            name = f"{_PADDING}{len(self._entries)}"
            self._write(name, "U8", [padding], memoryview(bytes(padding)))
        stored_as, shape = _NAMES.get(tensor.dtype), list(tensor.shape)
        if stored_as is None:
            stored_as, shape = "U8", [*shape, tensor.dtype.itemsize]
            self._as_bytes[key] = dtype_name(tensor.dtype)
        self._write(key, stored_as, shape, data)

    def _write(self, key: str, stored_as: str, shape: list[int], data: memoryview) -> None:
        begin = self.data_bytes
        end = begin + len(data)
        self._stream.write_at(self._data_start + begin, data)
        entry = {"dtype": stored_as, "shape": shape, "data_offsets": [begin, end]}
        text = f"{json.dumps(key)}:{json.dumps(entry, separators=(',', ':'))}"
        self._header_length += len(text) + 1
        self._entries.append((text, end))

    def _metadata(self) -> str:
        return f'"__metadata__":{json.dumps({_DTYPES_AS_BYTES: json.dumps(self._as_bytes)})}'

    def _header(self) -> bytes:
        entries = [text for text, _ in self._entries]
        if self._as_bytes:
            entries.insert(0, self._metadata())
        return ("{" + ",".join(entries) + "}").encode()

    def finish(self) -> int:
        """Write the header and give the file its name. Returns: its size in bytes."""
        header = self._header().ljust(self._data_start - _LENGTH_BYTES)
        self._stream.write_at(0, len(header).to_bytes(_LENGTH_BYTES, "little") + header)
        self._stream.commit()
        return self._data_start + self.data_bytes

    def discard(self) -> None:
        """Delete the unfinished file."""
        self._stream.discard()


def header_bytes_for(key: str, tensor: torch.Tensor) -> int:
    """Return an upper bound of the bytes that one tensor adds to a header.

    These are an entry (96 bytes of names, punctuation and two numbers besides key and shape), an
    entry of padding, and the key twice more, escaped again, if the metadata holds its dtype.
    """
    return 5 * len(json.dumps(key)) + 24 * tensor.dim() + 2 * 96 + 64


class ShardReader:
    """Maps the tensors of a safetensors file one by one, without keeping the file open.

    Raises: TraceError naming the file and key, if the file is invalid.
    """

    def __init__(self, folder: Folder, name: str) -> None:
        self._folder = folder
        self._path = folder.existing(name)
        self._size_bytes = self._path.stat().st_size
        self.entries = self._read_header()

    def _read_header(self) -> dict[str, ShardEntry]:
        length = int.from_bytes(self._folder.read(self._path, _LENGTH_BYTES), "little")
        data_start = _LENGTH_BYTES + length
        if self._size_bytes < data_start or length > _LARGEST_HEADER:
            what = f"a header of {length} bytes in a file of {self._size_bytes}"
            raise TraceError.damaged(self._path, "", what)
        try:
            header = json.loads(self._folder.read(self._path, data_start)[_LENGTH_BYTES:])
            metadata = header.pop("__metadata__", {})
            as_bytes = dict(json.loads(metadata.get(_DTYPES_AS_BYTES, "{}")))
            described = dict(header)
        except (ValueError, AttributeError, TypeError, RecursionError):
            raise TraceError.damaged(self._path, "", "no safetensors header") from None
        entries = {}
        for key, fields in described.items():
            if key.startswith(_PADDING):
                continue
            try:
                entries[key] = _parse_entry(fields, as_bytes.get(key), data_start, self._size_bytes)
            except (ValueError, KeyError, TypeError) as error:
                what = f"the header is invalid ({error})"
                raise TraceError.damaged(self._path, key, what) from None
        return entries

    def tensor(self, key: str) -> torch.Tensor:
        """Map the tensor of `key`.

        Changes in place affect neither the file nor the results of later calls.
        """
        return _cut_out(self.entries[key], self._map())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Map all tensors at once, by key; changes in place do not affect the file."""
        memory = self._map()
        return {key: _cut_out(entry, memory) for key, entry in self.entries.items()}

    def _map(self) -> torch.UntypedStorage:
        return self._folder.map(self._path, self._size_bytes)


def _cut_out(entry: ShardEntry, memory: torch.UntypedStorage) -> torch.Tensor:
    if entry.begin == entry.end:
        return torch.empty(entry.shape, dtype=entry.dtype)
    size = (entry.end - entry.begin,)
    data = torch.empty(0, dtype=torch.uint8).set_(memory, entry.begin, size, (1,))
    if entry.begin % entry.dtype.itemsize:
        data = data.clone()
    return data.view(entry.dtype).reshape(entry.shape)


def _parse_entry(
    fields: dict[str, Any], dtype_as_bytes: object, data_start: int, file_size: int
) -> ShardEntry:
    stored_as, shape, (begin, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError("a size that is not a natural number")
    dtype = _DTYPES[stored_as]
    if math.prod(shape) * dtype.itemsize != end - begin:
        raise ValueError(f"{stored_as} {shape} in {end - begin} bytes")
    if data_start + end > file_size:
        raise ValueError(f"the tensor ends at byte {data_start + end} of {file_size}")
    if dtype_as_bytes is not None:
        dtype = dtype_called(dtype_as_bytes)
        if stored_as != "U8" or not shape or shape.pop() != dtype.itemsize:
            raise ValueError(f"no bytes of {dtype_as_bytes}")
    return ShardEntry(dtype, tuple(shape), data_start + begin, data_start + end)
