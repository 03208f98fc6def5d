"""Writing a trace while a model runs."""

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
import xxhash

from assay.files import Url
from assay.sites import Call, CallSite
from assay.trace.files import StorageError, TraceError
from assay.trace.index import (
    DIGEST,
    FORMAT,
    INDEX,
    MANIFEST,
    SCHEMA,
    Attached,
    Json,
    Line,
    TensorEntry,
    attachment_file,
    hash_manifest,
    hash_text,
    shard_file,
    to_text,
)
from assay.trace.layout import ShardWriter, dtype_name, hash_tensors, header_bytes_for, host_bytes
from assay.trace.remote import create_folder

DEFAULT_SHARD_BYTES = 1 << 30

# Hashes kept to store each content once, in about 20 MB of memory. With more distinct tensors, the
# tensor of the least recently used hash may be stored again.
_REMEMBERED_CONTENTS = 1 << 16

# Space for a header: a quarter more than the last one needed. A full header ends its shard.
_FIRST_HEADER_BYTES = 1 << 16
_SMALLEST_HEADER_BYTES = 1 << 12

_ATTACHMENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}")


class TraceWriter:
    """Writes one trace. Use it as a context manager, or call `close`.

    `add` writes a tensor from its own memory: later changes by the model do not affect the trace, and
    no tensor is kept in memory. After an exception the trace has the added calls and is incomplete.

    Args:
        folder: a folder or URL, new or empty.
        manifest: JSON values that describe the run.
        shard_bytes: a shard of this size is flushed.

    Raises: TraceError if the folder is not empty or in use, StorageError if it cannot be written.
    """

    def __init__(
        self,
        folder: str | Path | Url,
        manifest: Mapping[str, Json],
        *,
        shard_bytes: int = DEFAULT_SHARD_BYTES,
    ) -> None:
        self._manifest = dict(manifest)
        self._folder = create_folder(folder)
        self._index_hasher = xxhash.xxh3_128()
        self._folder.create_exclusive(MANIFEST, self._manifest_text(None, self._manifest))
        self._index = self._folder.lines(INDEX)
        self._shard_bytes = shard_bytes
        self._num_lines = 0
        self._num_shards = 0
        self._num_stored = 0
        self._num_bytes = 0
        self._header_bytes = _FIRST_HEADER_BYTES
        self._shard: ShardWriter | None = None
        self._line = Line()
        self._sites: set[CallSite] = set()
        self._contents: OrderedDict[tuple[bytes, torch.dtype, torch.Size], TensorEntry]
        self._contents = OrderedDict()
        self._attachments: set[str] = set()
        self._closed: StorageError | None = None
        self._is_complete = False

    @property
    def folder(self) -> Path:
        """The folder of the trace; the local spool of a trace behind a URL."""
        return self._folder.path

    @property
    def is_complete(self) -> bool:
        """Return True once the trace is closed without an error, and holds calls."""
        return self._is_complete and bool(self._sites) and not self._folder.is_lost

    @property
    def num_bytes(self) -> int:
        """Bytes of distinct tensors."""
        return self._num_bytes

    def store(self, tensor: torch.Tensor) -> TensorEntry:
        """Write a tensor before the `add` of its call.

        Raises: TraceError if it is sparse, quantized or meta; StorageError if the disk is full.
        """
        with self._writing():
            return self._store(f"t{self._num_stored}", tensor)

    def add(self, call: Call, tensors: Mapping[str, torch.Tensor | TensorEntry]) -> None:
        """Record one finished call.

        Args:
            call: its `ports` are replaced by those of `tensors`.
            tensors: by port; strided tensors on any device, or results of `store`.

        Raises: TraceError if the call was added before, its constants are not JSON or a tensor is
            sparse, quantized or meta; StorageError if the disk is full.
        """
        if self._folder.is_lost:
            return
        with self._writing():
            if call.site in self._sites:
                raise TraceError(f"{call.site} was recorded twice")
            stored = {
                port: one
                if isinstance(one, TensorEntry)
                else self._store(f"{call.order}:{port}", one, f"{call.site}, {port}: ")
                for port, one in tensors.items()
            }
            try:
                self._line.add(call, stored)
            except TypeError as error:
                raise TraceError(f"{call.site}: its constants are not JSON: {error}") from None
            self._sites.add(call.site)
            if self._shard is not None and self._shard.data_bytes >= self._shard_bytes:
                self._finish_line()

    def flush(self) -> None:
        """Make all added calls survive a kill. Call it after each root forward call."""
        with self._writing():
            self._finish_line()

    def _store(self, key: str, tensor: torch.Tensor, place: str = "") -> TensorEntry:
        try:
            data = host_bytes(tensor)
        except TypeError as error:
            raise TraceError(f"{place}cannot record {error}") from None
        # By content, not by storage and version counter: some kernels change an argument without
        # a new version, and the hash (28 GB/s measured) costs less than the write.
        digest = xxhash.xxh3_128_digest(data)
        content = (digest, tensor.dtype, tensor.shape)
        stored = self._contents.get(content)
        if stored is not None:
            self._contents.move_to_end(content)
            return stored
        self._shard_for(key, tensor).append(key, tensor, data)
        self._num_stored += 1
        self._num_bytes += len(data)
        stored = TensorEntry(
            self._num_shards, key, digest.hex(), dtype_name(tensor.dtype), tuple(tensor.shape)
        )
        self._contents[content] = stored
        if len(self._contents) > _REMEMBERED_CONTENTS:
            self._contents.popitem(last=False)
        return stored

    def _shard_for(self, key: str, tensor: torch.Tensor) -> ShardWriter:
        if self._shard is not None and not self._shard.has_room_for(key, tensor):
            self._finish_shard()
            self._header_bytes *= 2
        if self._shard is None:
            stream = self._folder.stream(shard_file(self._num_shards))
            room = max(self._header_bytes, 64 + header_bytes_for(key, tensor))
            self._shard = ShardWriter(stream, room)
        return self._shard

    def _finish_shard(self) -> None:
        if self._shard is not None:
            needed = self._shard.header_bytes
            self._line.shards[self._num_shards] = self._shard.finish()
            self._shard = None
            self._num_shards += 1
            self._header_bytes = max(_SMALLEST_HEADER_BYTES, needed + needed // 4)

    def _finish_line(self) -> None:
        self._finish_shard()
        if self._line.num_calls:
            self._append(self._line.to_text())
            self._line = Line()

    def _append(self, line: str) -> None:
        self._index.append(line)
        self._index_hasher.update(f"{line}\n".encode())
        self._num_lines += 1

    def attach(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Store named tensors without a call, and flush them.

        Raises: TraceError if the name is used or not a plain file name, or a tensor is sparse,
            quantized or meta; StorageError if the disk is full.
        """
        with self._writing():
            file = self._new_attachment(name, "tensors")
            room = 64 + sum(header_bytes_for(key, tensor) for key, tensor in tensors.items())
            shard = ShardWriter(self._folder.stream(file), room)
            try:
                digest = hash_tensors(_appended(shard, tensors))
                size = shard.finish()
            except TypeError as error:
                raise TraceError(f"attachment {name!r}: cannot record {error}") from None
            finally:
                shard.discard()
            self._append(Attached(name, "tensors", size, digest).to_text())

    def attach_json(self, name: str, value: Json) -> None:
        """Store a JSON value without a call, and flush it.

        Raises: TraceError if the name is used or not a plain file name, or `value` is not JSON;
            StorageError if the disk is full.
        """
        with self._writing():
            try:
                text = to_text(value)
            except TypeError as error:
                raise TraceError(f"attachment {name!r} is not JSON: {error}") from None
            size = self._folder.replace(self._new_attachment(name, "json"), text)
            self._append(Attached(name, "json", size, hash_text(text)).to_text())

    def _new_attachment(self, name: str, kind: Literal["tensors", "json"]) -> str:
        if not _ATTACHMENT_NAME.fullmatch(name):
            raise TraceError(f"{name!r} cannot name an attachment: use letters, digits, . _ -")
        if name in self._attachments:
            raise TraceError(f"{self.folder} has an attachment {name!r} already")
        self._attachments.add(name)
        return attachment_file(name, kind)

    def note(self, name: str, value: Json) -> None:
        """Add a field to the manifest.

        Raises: TraceError if it is not JSON, StorageError if the disk is full.
        """
        with self._writing():
            text = self._manifest_text(None, self._manifest | {name: value})
            self._manifest[name] = value
            self._folder.replace(MANIFEST, text)

    def close(self) -> None:
        """Flush, and mark the trace as complete. A second call does nothing."""
        if self._closed is None:
            with self._writing():
                self._finish_line()
                self._folder.replace(MANIFEST, self._manifest_text(self._num_lines, self._manifest))
            self._stop(StorageError(f"{self.folder} is closed: nothing more can be recorded"))
            self._is_complete = True

    def _manifest_text(self, num_lines: int | None, manifest: Mapping[str, Json]) -> str:
        content: dict[str, Any] = {"format": FORMAT, "schema": SCHEMA}
        content |= {"complete": num_lines is not None, "lines": num_lines}
        content |= {"index": self._index_hasher.hexdigest(), "manifest": manifest}
        try:
            return to_text(content | {DIGEST: hash_manifest(content)}) + "\n"
        except TypeError as error:
            raise TraceError(f"the manifest of a trace must be JSON: {error}") from None

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Close the trace as incomplete if an exception interrupts a write."""
        if self._closed is not None:
            raise StorageError(str(self._closed))
        try:
            yield
        except TraceError:
            raise
        except StorageError as error:
            self._stop(error)
            raise
        except BaseException:
            self._stop(StorageError(f"{self.folder}: writing was interrupted"))
            raise

    def _stop(self, reason: StorageError) -> None:
        self._closed = reason
        if self._shard is not None:
            self._shard.discard()
            self._shard = None
        self._index.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        elif self._closed is None:
            try:
                self.flush()
            except StorageError as second:
                error.add_note(str(second))
            else:
                self._stop(StorageError(f"{self.folder} is closed after an error"))


def _appended(
    shard: ShardWriter, tensors: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor, memoryview]]:
    """Append tensors one by one. Yields: the arguments of `hash_tensors`."""
    for key, tensor in tensors.items():
        data = host_bytes(tensor)
        shard.append(key, tensor, data)
        yield key, tensor, data
