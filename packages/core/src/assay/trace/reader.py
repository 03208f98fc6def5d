"""Reading a trace: its index is in memory, its tensors are memory-mapped."""

import math
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import xxhash

from assay.errors import name_some
from assay.foreign_text import shorten
from assay.progress import counted
from assay.sites import Call, CallSite, Site
from assay.trace.files import Folder, TraceError
from assay.trace.index import (
    DIGEST,
    FORMAT,
    INDEX,
    MANIFEST,
    SCHEMA,
    Attached,
    Flush,
    Json,
    TensorEntry,
    flush_from_json,
    from_text,
    hash_manifest,
    hash_text,
    shard_file,
)
from assay.trace.layout import ShardReader, dtype_called, hash_tensors, host_bytes

# Number of headers kept in memory: a decode step reads from its own shard and a few before it.
_OPEN_SHARDS = 32


class Trace:
    """A trace on disk. `open` reads its index; tensors are mapped one by one.

    Attributes:
        manifest: the description of the run.
        complete: False if the writer did not close it; it holds the calls of all finished flushes.
        calls: in order of their start.
        attachments: names of the attachments.
    """

    def __init__(self, folder: Folder, manifest: dict[str, Any], flushes: list[Flush]) -> None:
        self.files = folder
        self.folder: Path = folder.path
        self.manifest: dict[str, Any] = manifest["manifest"]
        self.complete: bool = manifest["complete"]
        self._whole_manifest = manifest
        self._shards = {number: size for flush in flushes for number, size in flush.shards.items()}
        self._stored: dict[CallSite, dict[str, TensorEntry]] = {}
        self._call_at: dict[CallSite, Call] = {}
        for call, stored in sorted(
            (pair for flush in flushes for pair in flush.calls), key=lambda pair: pair[0].order
        ):
            if call.site in self._call_at:
                raise TraceError.damaged(self.folder / INDEX, str(call.site), "indexed twice")
            self._call_at[call.site] = call
            self._stored[call.site] = stored
        self.calls = tuple(self._call_at.values())
        self._attached = {f.attached.name: f.attached for f in flushes if f.attached is not None}
        self.attachments = tuple(self._attached)
        self._shard = lru_cache(_OPEN_SHARDS)(partial(ShardReader, folder))

    @classmethod
    def open(cls, folder: str | Path) -> "Trace":
        """Read the index, and check existence and size of every file in it.

        Raises: TraceError naming file and key, if the folder is not a usable trace.
        """
        trace = cls.open_index(folder)
        for error in trace.find_lost().values():
            raise error
        return trace

    @classmethod
    def open_index(cls, folder: str | Path) -> "Trace":
        """Read the index alone, for a trace that may lack files. Raises: TraceError."""
        opened = Folder(Path(folder))
        if not opened.path.is_dir():
            raise TraceError(f"{folder} is not a trace: there is no such folder")
        manifest = _read_manifest(opened)
        return cls(opened, manifest, _read_index(opened, manifest))

    def find_lost(self) -> dict[str, TraceError]:
        """Return an error for each file that is missing or has another size than in the index, by name.

        Raises: TraceError if the index contradicts itself.
        """
        first_key: dict[int, str] = {}
        for stored in self._stored.values():
            for tensor in stored.values():
                first_key.setdefault(tensor.shard, tensor.key)
                if tensor.shard not in self._shards:
                    path = self.folder / shard_file(tensor.shard)
                    raise TraceError.damaged(path, tensor.key, "the index does not list the file")
        files = [
            (shard_file(number), size, first_key.get(number, ""))
            for number, size in self._shards.items()
        ]
        files += [(one.file, one.size_bytes, one.name) for one in self._attached.values()]
        lost = {}
        for name, size, key in files:
            try:
                self._check_file(name, size, key)
            except TraceError as error:
                lost[name] = error
        return lost

    def _check_file(self, name: str, expected: int, key: str) -> None:
        path = self.folder / name
        try:
            actual = self.files.existing(name).stat().st_size
        except TraceError as error:
            raise TraceError(f"{error} (needed for {shorten(repr(key))})") from None
        if actual != expected:
            what = f"the file has {actual} bytes, the index says {expected}"
            raise TraceError.damaged(path, key, what)

    @property
    def modules(self) -> tuple[str, ...]:
        """Paths of all modules that were called, in order of their first call."""
        return tuple(dict.fromkeys(call.site.module for call in self.calls))

    def find(self, site: CallSite) -> Call | None:
        """Return the call at `site`; None if it was not recorded."""
        return self._call_at.get(site)

    def sites(self) -> Iterator[Site]:
        """Yield the address of every tensor, call by call."""
        for site, stored in self._stored.items():
            for port in stored:
                yield Site(site, port)

    def stored(self, call: Call, port: str) -> TensorEntry:
        """Return the index entry of a tensor.

        Raises: TraceError if the trace has no such call or port.
        """
        ports = self._stored.get(call.site)
        if ports is None:
            sites = (one.site for one in self.calls if one.site.module == call.site.module)
            calls = [str(Site(site, "*")) for site in sites]
            raise TraceError.absent(self.folder, f"call {call.site}", calls)
        if port not in ports:
            raise TraceError.absent(self.folder, f"{Site(call.site, port)}", list(ports))
        return ports[port]

    def tensor(self, call: Call, port: str) -> torch.Tensor:
        """Map the tensor at a port of a call.

        Changes in place affect neither the file nor later results.

        Raises: TraceError if the trace has no such call or port, or the shard is damaged.
        """
        stored = self.stored(call, port)
        name = shard_file(stored.shard)
        shard = self._shard(name)
        entry = shard.entry(stored.key)
        if (entry.dtype, entry.shape) != (stored.dtype, stored.shape):
            what = (
                f"the shard holds {entry.dtype} {list(entry.shape)}, "
                f"the index says {stored.dtype} {list(stored.shape)}"
            )
            raise TraceError.damaged(self.folder / name, stored.key, what)
        return shard.tensor(stored.key)

    def is_stored(self, call: Call, port: str) -> bool:
        """Return True if the shard of a tensor exists and has all of its bytes."""
        stored = self.stored(call, port)
        try:
            self._shard(shard_file(stored.shard)).entry(stored.key)
        except TraceError:
            return False
        return True

    def intact_tensor(self, call: Call, port: str) -> torch.Tensor:
        """Map the tensor at a port of a call, and check its hash.

        Raises: TraceError as `tensor`, or if the values have changed.
        """
        tensor, stored = self.tensor(call, port), self.stored(call, port)
        if xxhash.xxh3_128_hexdigest(host_bytes(tensor)) != stored.digest:
            name = self.folder / shard_file(stored.shard)
            raise TraceError.damaged(name, str(Site(call.site, port)), "its values have changed")
        return tensor

    def attachment(self, name: str) -> dict[str, torch.Tensor]:
        """Map the tensors attached under `name`.

        Raises: TraceError if there is no such attachment or it is damaged.
        """
        return ShardReader(self.files, self.attached_as(name, "tensors").file).tensors()

    def attachment_json(self, name: str) -> Json:
        """Read the JSON value attached under `name`.

        Raises: TraceError if there is no such attachment or it is damaged.
        """
        file = self.attached_as(name, "json").file
        try:
            value: Json = from_text(self.files.read(self.files.existing(file)).decode())
        except (ValueError, RecursionError) as error:
            raise TraceError.damaged(self.folder / file, name, f"not JSON ({error})") from None
        return value

    @property
    def digest(self) -> str:
        """The manifest's hash over all recorded values."""
        return str(self._whole_manifest.get(DIGEST))

    def find_changes(self) -> list[str]:
        """Compare manifest and index with their recorded hashes, without reading a tensor.

        A trace that was cut off has no hash of its last lines.
        Returns: a line for each changed file, with its name and the change.
        """
        found = []
        if hash_manifest(self._whole_manifest) != self.digest:
            found.append(f"{MANIFEST}: its values")
        if self.complete:
            index = self.files.read(self.files.existing(INDEX))
            if xxhash.xxh3_128_hexdigest(index) != self._whole_manifest.get("index"):
                found.append(f"{INDEX}: the list of calls and tensors")
        return found

    def find_damage(self) -> list[str]:
        """Compare every file with its recorded hash.

        Returns: one line for each damaged file, with its name and the damage.
        """
        found = self.find_changes()
        for number, tensors in counted("hashes", self._tensors_by_shard().items(), "files"):
            name = shard_file(number)
            try:
                shard = ShardReader(self.files, name).tensors()
                stored = {key: host_bytes(tensor) for key, tensor in shard.items()}
            except TraceError:
                found.append(f"{name}: its header")
                continue
            bad = [
                place
                for key, (digest, place) in tensors.items()
                if key not in stored or xxhash.xxh3_128_hexdigest(stored[key]) != digest
            ]
            if bad:
                found.append(f"{name}: the values of {name_some(bad)}")
        attached = self._attached.values()
        return found + [
            f"{one.file}: the values of {one.name}" for one in attached if not self.is_intact(one)
        ]

    def is_intact(self, attached: Attached) -> bool:
        """Return True if the content of an attachment has its recorded hash."""
        try:
            if attached.kind == "json":
                text = self.files.read(self.files.existing(attached.file)).decode()
                return hash_text(text) == attached.digest
            tensors = ShardReader(self.files, attached.file).tensors()
        except (TraceError, ValueError):
            return False
        named = ((key, one, host_bytes(one)) for key, one in tensors.items())
        return hash_tensors(named) == attached.digest

    def _tensors_by_shard(self) -> dict[int, dict[str, tuple[str, str]]]:
        """Return the content hash and the first place of each tensor, by shard and key."""
        shards: dict[int, dict[str, tuple[str, str]]] = {number: {} for number in self._shards}
        for site, ports in self._stored.items():
            for port, stored in ports.items():
                place = (stored.digest, f"{Site(site, port)}")
                shards[stored.shard].setdefault(stored.key, place)
        return shards

    def attached_as(self, name: str, kind: str) -> Attached:
        """Return the index entry of an attachment. Raises: TraceError if there is none of this kind."""
        attached = self._attached.get(name)
        if attached is None or attached.kind != kind:
            present = [f"{one.name} ({one.kind})" for one in self._attached.values()]
            raise TraceError.absent(self.folder, f"attachment {name!r} ({kind})", present)
        return attached

    @property
    def unique_bytes(self) -> int:
        """Bytes of the distinct tensors of all calls."""
        distinct = {tensor for stored in self._stored.values() for tensor in stored.values()}
        return sum(dtype_called(one.dtype).itemsize * math.prod(one.shape) for one in distinct)


def read_digest(folder: Path) -> str:
    """Return the `Trace.digest` of the trace in `folder`. Raises: as `Trace.open`."""
    return str(_read_manifest(Folder(folder)).get(DIGEST))


def _read_manifest(folder: Folder) -> dict[str, Any]:
    path = folder.path / MANIFEST
    if not path.exists():
        inner = sorted(one.parent.name for one in folder.path.glob(f"*/{MANIFEST}"))
        hint = f"; these of its folders are traces: {name_some(inner)}" if inner else ""
        raise TraceError(f"{folder.path} is not a trace: it has no {MANIFEST}{hint}")
    try:
        manifest = from_text(folder.read(folder.existing(MANIFEST)).decode())
    except (ValueError, RecursionError) as error:
        raise TraceError.damaged(path, "", f"not JSON ({error})") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise TraceError(
            f"{folder.path} is not a trace: {MANIFEST} does not have format {FORMAT!r}"
        )
    if manifest.get("schema") != SCHEMA:
        raise TraceError(
            f"{path}: schema {shorten(manifest.get('schema'))}, this version of assay reads {SCHEMA}: "
            "capture the trace again, or use the version that wrote it"
        )
    if not isinstance(manifest.get("manifest"), dict) or type(manifest.get("complete")) is not bool:
        raise TraceError.damaged(path, "manifest", "the fields of a manifest are missing")
    return manifest


def _read_index(folder: Folder, manifest: dict[str, Any]) -> list[Flush]:
    path = folder.path / INDEX
    if not path.exists() and not manifest["complete"]:
        return []
    # A kill of the writer can leave a line without its end.
    lines = folder.read(folder.existing(INDEX)).split(b"\n")[:-1]
    if manifest["complete"] and len(lines) != manifest.get("lines"):
        what = f"{len(lines)} lines, the manifest says {manifest.get('lines')}"
        raise TraceError.damaged(path, "", what)
    flushes = []
    seen: dict[TensorEntry, TensorEntry] = {}
    for number, line in enumerate(lines, start=1):
        try:
            flushes.append(flush_from_json(from_text(line.decode()), seen))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as e:
            raise TraceError.damaged(path, f"line {number}", f"{type(e).__name__}: {e}") from None
    return flushes
