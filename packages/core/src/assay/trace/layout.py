"""A safetensors file, written as a stream and read by memory mapping.

The header comes first but is complete last. Space is reserved for it, so that tensors are written
from the memory of the model, without a copy.
"""

import json
from collections.abc import Iterable
from dataclasses import replace

import torch
import xxhash

from assay.files import UnreadableFileError
from assay.files.safetensors import DTYPES, LENGTH_BYTES, HeaderEntry, read_cut_header
from assay.trace.files import Folder, OutStream, TraceError

# torch aligns memory to 64 bytes. For other memory, kernels of some libraries take a path with
# other rounding, and replays must be bitwise equal. Padding is stored as tensors since the format
# forbids holes.
_ALIGNMENT = 64
_PADDING = "__pad__"

# Other dtypes, which not every safetensors reader supports, are stored as bytes with one more
# dimension; this key of the header's metadata holds the dtypes.
_DTYPES_AS_BYTES = "torch_dtypes"
_NAMES = {
    getattr(torch, dtype): name
    for name, (dtype, _) in DTYPES.items()
    if name not in ("C64", "F8_E8M0")
}


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


def hash_tensors(tensors: Iterable[tuple[str, torch.Tensor, memoryview]]) -> str:
    """Hash named tensors with their dtypes and shapes. tensors: name, tensor and its bytes."""
    hasher = xxhash.xxh3_128()
    for key, tensor, data in tensors:
        hasher.update(f"{key}:{dtype_name(tensor.dtype)}{list(tensor.shape)}".encode())
        hasher.update(data)
    return hasher.hexdigest()


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
        return LENGTH_BYTES + len(self._header())

    def has_room_for(self, key: str, tensor: torch.Tensor) -> bool:
        """Return True if the header has space for one more tensor."""
        needed = header_bytes_for(key, tensor)
        if self._as_bytes:
            needed += len(self._metadata())
        return LENGTH_BYTES + self._header_length + needed <= self._data_start

    def append(self, key: str, tensor: torch.Tensor, data: memoryview) -> None:
        """Write a tensor under `key`. data: its bytes."""
        padding = -self.data_bytes % _ALIGNMENT
        if padding and data:  # a gap in a file, which data follows, reads as zeros
            self._enter(f"{_PADDING}{len(self._entries)}", "U8", [padding], padding)
        stored_as, shape = _NAMES.get(tensor.dtype), list(tensor.shape)
        if stored_as is None:
            stored_as, shape = "U8", [*shape, tensor.dtype.itemsize]
            self._as_bytes[key] = dtype_name(tensor.dtype)
        self._stream.write_at(self._data_start + self.data_bytes, data)
        self._enter(key, stored_as, shape, len(data))

    def _enter(self, key: str, stored_as: str, shape: list[int], num_bytes: int) -> None:
        begin = self.data_bytes
        end = begin + num_bytes
        sizes = ",".join(map(str, shape))
        text = (
            f'{json.dumps(key)}:{{"dtype":"{stored_as}","shape":[{sizes}],'
            f'"data_offsets":[{begin},{end}]}}'
        )
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
        header = self._header().ljust(self._data_start - LENGTH_BYTES)
        self._stream.write_at(0, len(header).to_bytes(LENGTH_BYTES, "little") + header)
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
        self._size_bytes = 0
        self.entries = self._read_header()
        """By key. Their dtypes have torch's names."""

    def entry(self, key: str) -> HeaderEntry:
        """Return an entry. Raises: TraceError if it is missing, or the file ends before its last byte."""
        entry = self.entries.get(key)
        if entry is None:
            raise TraceError.damaged(self._path, key, "the shard has no such key")
        if entry.end > self._size_bytes:
            what = f"it ends at byte {entry.end:,}, the file has {self._size_bytes:,}"
            raise TraceError.damaged(self._path, key, what)
        return entry

    def _read_header(self) -> dict[str, HeaderEntry]:
        try:
            tensors, metadata, self._size_bytes = read_cut_header(self._path)
            as_bytes = dict(json.loads(metadata.get(_DTYPES_AS_BYTES, "{}")))
        except UnreadableFileError as error:
            raise TraceError.of_file(error) from None
        except (ValueError, TypeError, RecursionError):
            raise TraceError.damaged(self._path, "", "no safetensors header") from None
        entries = {}
        for one in tensors:
            if not one.name.startswith(_PADDING):
                try:
                    entries[one.name] = _as_recorded(one, as_bytes.get(one.name))
                except (ValueError, KeyError) as error:
                    what = f"the header is invalid ({error})"
                    raise TraceError.damaged(self._path, one.name, what) from None
        return entries

    def tensor(self, key: str) -> torch.Tensor:
        """Map the tensor of `key`.

        Changes in place affect neither the file nor the results of later calls.
        """
        return _cut_out(self.entry(key), self._map())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Map all tensors at once, by key; changes in place do not affect the file."""
        memory = self._map()
        return {key: _cut_out(self.entry(key), memory) for key in self.entries}

    def _map(self) -> torch.UntypedStorage:
        return self._folder.map(self._path, self._size_bytes)


def _cut_out(entry: HeaderEntry, memory: torch.UntypedStorage) -> torch.Tensor:
    dtype = dtype_called(entry.dtype)
    if not entry.size_bytes:
        return torch.empty(entry.shape, dtype=dtype)
    data = torch.empty(0, dtype=torch.uint8).set_(memory, entry.start, (entry.size_bytes,), (1,))
    if entry.start % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).reshape(entry.shape)


def _as_recorded(entry: HeaderEntry, dtype_as_bytes: object) -> HeaderEntry:
    """Return an entry with the dtype and shape of the recorded tensor."""
    if dtype_as_bytes is None:
        return replace(entry, dtype=DTYPES[entry.dtype][0])
    dtype = dtype_called(dtype_as_bytes)
    if entry.dtype != "U8" or entry.shape[-1:] != (dtype.itemsize,):
        raise ValueError(f"no bytes of {dtype_as_bytes}")
    return replace(entry, dtype=dtype_name(dtype), shape=entry.shape[:-1])
