"""Sealed records: JSON files that carry a digest of their own content.

A digest detects changes made by accident or by hand. It is not a signature: anyone who can write the
file can write its digest. The hash is BLAKE2b (RFC 7693) from the standard library, so that planning
needs no other package.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from assay.files.reading import UnreadableFileError, open_file, parse_record, read_json_object
from assay.files.writing import write_whole

DIGEST = "digest"

_CHUNK_BYTES = 1 << 22
_DIGEST_BYTES = 16

_Model = TypeVar("_Model", bound=BaseModel)


def content_digest(content: Mapping[str, Any]) -> str:
    """Hash a JSON object without its key `digest`. The order of its keys does not matter."""
    values = {key: value for key, value in content.items() if key != DIGEST}
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def file_digest(path: Path) -> str:
    """Hash the bytes of a file. Raises: UnreadableFileError."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    with open_file(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def seal(content: Mapping[str, Any]) -> str:
    """Format a JSON object with its digest, as the text of a file."""
    return json.dumps({**content, DIGEST: content_digest(content)}, indent=1) + "\n"


def write_sealed(path: Path, record: BaseModel) -> Path:
    """Write `record` as JSON with its digest. Raises: DiskError."""
    return write_whole(path, seal(json.loads(record.model_dump_json(by_alias=True))))


def read_sealed(kind: type[_Model], path: Path) -> _Model:
    """Read a file of `write_sealed`.

    Raises: UnreadableFileError if its digest is absent or does not match the content.
    """
    return parse_record(kind, json.dumps(read_sealed_json(path)), path)


def read_sealed_json(path: Path) -> dict[str, Any]:
    """Read the JSON object that `seal` formatted, without its digest. Raises: as in `read_sealed`."""
    content = read_json_object(path)
    if DIGEST not in content:
        raise UnreadableFileError.of(
            path, "it has no digest, so that a change could not be detected"
        )
    return check_seal(content, path)


def check_seal(content: Mapping[str, Any], path: Path | str) -> dict[str, Any]:
    """Return the content of `path` without its digest.

    Raises: UnreadableFileError if the digest does not match the content.
    """
    if content[DIGEST] != content_digest(content):
        raise UnreadableFileError.of(
            path, "it was changed after assay wrote it: its digest differs"
        )
    return {key: value for key, value in content.items() if key != DIGEST}
