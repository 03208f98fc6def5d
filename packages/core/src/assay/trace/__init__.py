"""Traces on disk: the tensors of a run by Site, crash-safe, each value once, without pickle.

A trace is a folder: `manifest.json` describes the run, `index.jsonl` has a line for every flush
with the finished calls and the places of their tensors, `shard-NNNNNN.safetensors` are one or more
for each flush, and `attachments/` holds named tensors and JSON values without a call. Everything
in the index survives a kill of the writer. `remote` stores the same files behind a URL, and
fetches them.
"""

from assay.trace.files import StorageError, TraceError, require_fields
from assay.trace.index import Json, TensorEntry
from assay.trace.reader import Trace, read_digest
from assay.trace.remote import RemoteCopy, list_names
from assay.trace.writer import TraceWriter

__all__ = [
    "Json",
    "RemoteCopy",
    "StorageError",
    "TensorEntry",
    "Trace",
    "TraceError",
    "TraceWriter",
    "list_names",
    "read_digest",
    "require_fields",
]
