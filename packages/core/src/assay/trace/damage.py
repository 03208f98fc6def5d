"""Finding the files of a trace that have changed since they were recorded."""

from collections.abc import Iterator

import xxhash

from assay.errors import name_some
from assay.progress import counted
from assay.trace.errors import TraceError
from assay.trace.index import INDEX, MANIFEST, Attached, hash_text, shard_file
from assay.trace.layout import ShardReader, hash_tensors, host_bytes
from assay.trace.reader import Trace


def find_damage(trace: Trace) -> list[str]:
    """Compare every file of `trace` with its recorded hash.

    Returns: one line for each damaged file, with its name and the damage.
    """
    return [f"{file}: {what}" for file, what in _damaged_files(trace)]


def _damaged_files(trace: Trace) -> Iterator[tuple[str, str]]:
    if not trace.manifest_is_intact():
        yield MANIFEST, "its values"
    if not trace.index_is_intact():
        yield INDEX, "the list of calls and tensors"
    shards = trace.tensors_by_shard()
    for number, tensors in counted("hashes", shards.items(), "files"):
        name = shard_file(number)
        try:
            shard = ShardReader(trace.files, name).tensors()
            stored = {key: host_bytes(tensor) for key, tensor in shard.items()}
        except TraceError:
            yield name, "its header"
            continue
        bad = [
            place
            for key, (digest, place) in tensors.items()
            if key not in stored or xxhash.xxh3_128_hexdigest(stored[key]) != digest
        ]
        if bad:
            yield name, f"the values of {name_some(bad)}"
    for attached in trace.attached():
        if not is_intact(trace, attached):
            yield attached.file, f"the values of {attached.name}"


def is_intact(trace: Trace, attached: Attached) -> bool:
    """Return True if the content of an attachment has its recorded hash."""
    files = trace.files
    try:
        if attached.kind == "json":
            return hash_text(files.read(files.existing(attached.file)).decode()) == attached.digest
        tensors = ShardReader(files, attached.file).tensors()
    except (TraceError, ValueError):
        return False
    return hash_tensors((key, t, host_bytes(t)) for key, t in tensors.items()) == attached.digest
