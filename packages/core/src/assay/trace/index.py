"""Reading and writing index.jsonl: finished calls and attachments.

A line is one flush. It lists the shards of the flush with their sizes, the row maps of its calls
(each once), and its calls with the shard, key, content hash, dtype and shape of the tensor at every
port. Shards have numbers, so that no line can name a path.

Content hashes are XXH3-128, not cryptographic, 28 GB/s measured.
Source: Collet, xxHash fast digest algorithm (the XXH3 family).
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import xxhash

from assay.sites import Call, CallSite, Phase, RowMap
from assay.trace.layout import dtype_called, dtype_name

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"

# JSON lacks NaN and the infinities. They are written {"$float": "nan"}: every line is valid for other readers.
_TAG = "$float"
_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def _tagged(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return {_TAG: repr(value)}
    if isinstance(value, Mapping):
        return {key: _tagged(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_tagged(item) for item in value]
    return value


def _untagged(value: dict[str, str]) -> float | dict[str, str]:
    return float(str(value[_TAG])) if value.keys() == {_TAG} else value


def to_text(value: object) -> str:
    """Convert a value to one line of JSON.

    Raises: TypeError if it has no JSON form.
    """
    try:
        return _ENCODER.encode(value)
    except ValueError:
        return _ENCODER.encode(_tagged(value))


def from_text(text: str) -> Json:
    """Convert the result of `to_text` back, with lists for tuples.

    Raises: ValueError if `text` is not JSON, RecursionError if it is nested too deep.
    """
    value: Json = json.loads(text, object_hook=_untagged if _TAG in text else None)
    return value


MANIFEST = "manifest.json"
INDEX = "index.jsonl"
SCHEMA = 2
FORMAT = "assay-trace"
DIGEST = "digest"

_PHASES = frozenset(get_args(Phase))


class TensorEntry(NamedTuple):
    """Place, content hash (xxh3-128 of the bytes), dtype and shape of a tensor of a call."""

    shard: int
    key: str
    digest: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Attached:
    """The index entry of an attachment."""

    name: str
    kind: Literal["tensors", "json"]
    size_bytes: int
    digest: str
    """Hash of its tensors or its text."""

    @property
    def file(self) -> str:
        """Name of the file inside of the folder."""
        return attachment_file(self.name, self.kind)

    def to_text(self) -> str:
        """Return the line in the index."""
        entry = {"attached": self.name, "kind": self.kind, "size": self.size_bytes}
        return to_text(entry | {"digest": self.digest})


@dataclass(slots=True)
class Flush:
    """The content of one line of the index."""

    shards: dict[int, int] = field(default_factory=dict)
    calls: list[tuple[Call, dict[str, TensorEntry]]] = field(default_factory=list)
    attached: Attached | None = None


class Line:
    """Collects the calls of one line as text: a call may change after `add`."""

    def __init__(self) -> None:
        self.shards: dict[int, int] = {}
        self._calls: list[str] = []
        self._rows: list[RowMap] = []
        self._rows_number: dict[int, int] = {}

    @property
    def num_calls(self) -> int:
        """Number of calls added."""
        return len(self._calls)

    def add(self, call: Call, stored: Mapping[str, TensorEntry]) -> None:
        """Append a call.

        Raises: TypeError if its constants are not JSON.
        """
        record = _call_to_json(call, stored)
        if call.rows is not None:
            record["rows"] = self._number_of(call.rows)
        self._calls.append(to_text(record))

    def _number_of(self, rows: RowMap) -> int:
        # By identity first: all calls of a root call share one object, and a comparison of its
        # positions for each of them would cost more than the rest of the line. _rows_number holds
        # ids of objects in _rows only: after the death of another object, a new one can get its id.
        number = self._rows_number.get(id(rows))
        if number is None:
            if rows in self._rows:
                return self._rows.index(rows)
            number = self._rows_number[id(rows)] = len(self._rows)
            self._rows.append(rows)
        return number

    def to_text(self) -> str:
        """Return the text of the line."""
        rows = [{"prompts": rows.prompts, "positions": rows.positions} for rows in self._rows]
        start = to_text({"shards": list(self.shards.items()), "rows": rows})
        return f'{start[:-1]},"calls":[{",".join(self._calls)}]}}'


def hash_text(text: str) -> str:
    """Hash a text."""
    return xxhash.xxh3_128_hexdigest(text.encode())


def hash_manifest(manifest: Mapping[str, Any]) -> str:
    """Hash a manifest without its field `digest`. Raises: TypeError if it is not JSON."""
    return hash_text(to_text({key: manifest[key] for key in manifest if key != DIGEST}))


def shard_file(number: int) -> str:
    """Return the file name of a shard."""
    return f"shard-{number:06d}.safetensors"


def attachment_file(name: str, kind: Literal["tensors", "json"]) -> str:
    """Return the file name of an attachment."""
    return f"attachments/{name}.{'safetensors' if kind == 'tensors' else 'json'}"


def _call_to_json(call: Call, stored: Mapping[str, TensorEntry]) -> dict[str, Any]:
    site = call.site
    record: dict[str, Any] = {
        "order": call.order,
        "module": site.module,
        "class": call.class_name,
        "caller": call.caller,
        "step": site.step,
        "ports": stored,
    }
    if site.phase != "forward":
        record["phase"] = site.phase
    optional = {
        "call": site.call,
        "micro_batch": site.micro_batch,
        "rank": site.rank,
        "constants": dict(call.constants),
        "placements": dict(call.placements),
    }
    return record | {name: value for name, value in optional.items() if value}


def flush_from_json(line: object, seen: dict[TensorEntry, TensorEntry]) -> Flush:
    """Read one line; entries that equal one of `seen` are replaced by it.

    Raises: ValueError, TypeError, KeyError, IndexError or AttributeError for an invalid line.
    """
    if not isinstance(line, dict):
        raise TypeError("not an object")
    if "attached" in line:
        if line["kind"] not in ("tensors", "json"):
            raise ValueError(f"an attachment of kind {line['kind']!r}")
        size, digest = _natural(line["size"]), _text(line["digest"])
        return Flush(attached=Attached(_text(line["attached"]), line["kind"], size, digest))
    rows = [
        RowMap(
            tuple(_whole(number) for number in record["prompts"]),
            tuple(tuple(_whole(number) for number in row) for row in record["positions"]),
        )
        for record in line["rows"]
    ]
    return Flush(
        shards={_natural(number): _natural(size) for number, size in line["shards"]},
        calls=[_call_from_json(record, rows, seen) for record in line["calls"]],
    )


def _call_from_json(
    record: dict[str, Any], rows: list[RowMap], seen: dict[TensorEntry, TensorEntry]
) -> tuple[Call, dict[str, TensorEntry]]:
    stored = {}
    for port, (shard, key, digest, dtype, shape) in record["ports"].items():
        # Most entries equal an earlier one, whose fields are valid.
        entry = seen.get((shard, key, digest, dtype, tuple(shape)))  # type: ignore[call-overload]
        if entry is None:
            entry = TensorEntry(
                _natural(shard),
                _text(key),
                _text(digest),
                dtype_name(dtype_called(dtype)),
                tuple(_natural(number) for number in shape),
            )
            entry = seen.setdefault(entry, entry)
        stored[sys.intern(port)] = entry
    site = CallSite(
        step=_whole(record["step"]),
        module=sys.intern(_text(record["module"])),
        call=_natural(record.get("call", 0)),
        phase=_phase(record.get("phase", "forward")),
        micro_batch=_natural(record.get("micro_batch", 0)),
        rank=_natural(record.get("rank", 0)),
    )
    caller = record["caller"]
    return Call(
        site=site,
        class_name=sys.intern(_text(record["class"])),
        caller=None if caller is None else sys.intern(_text(caller)),
        order=_whole(record["order"]),
        ports=tuple(stored),
        constants=dict(record.get("constants", {})),
        rows=rows[_natural(record["rows"])] if "rows" in record else None,
        placements={port: _text(how) for port, how in record.get("placements", {}).items()},
    ), stored


def _whole(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is not an integer")
    return value


def _natural(value: object) -> int:
    number = _whole(value)
    if number < 0:
        raise ValueError(f"{number} is negative")
    return number


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def _phase(value: object) -> Phase:
    if value not in _PHASES:
        raise ValueError(f"unknown phase {value!r}")
    return value  # type: ignore[return-value]  # the line above checks it
