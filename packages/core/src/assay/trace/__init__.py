"""Traces on disk: every tensor of a run by its Site, crash-safe, each value once, no pickle.

A trace is one folder: `manifest.json` (what was run), `index.jsonl` (append-only; one line for
every flush lists the finished calls and where their tensors are), `shard-NNNNNN.safetensors` (one
or more for each flush) and `attachments/` (named tensors and JSON values that belong to no call).
All that the index lists survives a kill of the writer. `remote/` keeps the same files behind a URL.
"""

from assay.trace.damage import find_damage, is_intact
from assay.trace.errors import StorageError, TraceError
from assay.trace.index import StoredTensor
from assay.trace.json_text import Json
from assay.trace.reader import Summary, Trace, read_digest
from assay.trace.remote.reading import RemoteCopy, list_names
from assay.trace.writer import TraceWriter

__all__ = [
    "Json",
    "RemoteCopy",
    "StorageError",
    "StoredTensor",
    "Summary",
    "Trace",
    "TraceError",
    "TraceWriter",
    "find_damage",
    "is_intact",
    "list_names",
    "read_digest",
]
