"""Write files atomically, seal records with a digest of their content, and parse locations.

A sealed record is a JSON file with a digest, which detects changes made by accident or by hand. It is
not a signature: anyone who can write the file can write its digest. The hash is BLAKE2b (RFC 7693) from
the standard library, so that planning needs no other package.
"""

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from assay.errors import MachineError, UsageError
from assay.files.reading import (
    UnreadableFileError,
    open_file,
    parse_record,
    read_json_object,
    require_numbers,
)

_LOCAL = "file://"


@dataclass(frozen=True, slots=True)
class Url:
    """A URL of remote storage. `/` appends a name, as for a path."""

    text: str

    def __str__(self) -> str:
        return self.text

    def __truediv__(self, name: str) -> "Url":
        return Url(f"{self.text.rstrip('/')}/{name}")


def parse_location(text: str | Path | Url) -> Path | Url:
    """Parse a folder or a URL; `file://` stands for a folder.

    Raises: UsageError if the URL holds a password, which would be printed and stored.
    """
    if isinstance(text, (Path, Url)):
        return text
    if "://" not in text:
        return Path(text)
    if text.startswith(_LOCAL):
        return Path(text.removeprefix(_LOCAL))
    if re.search(r"://[^/@]*:[^/]*@", text):
        scheme = text.partition("://")[0]
        raise UsageError(
            f"the {scheme}:// URL holds a password: give it where other tools for {scheme} read it"
        )
    return Url(text)


class DiskError(MachineError):
    """Error for a write that the file system refused."""

    @classmethod
    def refused(cls, path: Path, error: OSError) -> "DiskError":
        """Make the error for a write to `path` that failed with `error`."""
        return cls(f"cannot write {path}: {error.strerror or error}")


def create_temporary(path: Path) -> tuple[int, Path]:
    """Create a new file in the folder of `path`, to be renamed to `path`.

    Its name is unpredictable and must not exist yet, so that a link cannot redirect the write.

    Returns: the descriptor, open for writing, and the file.
    Raises: OSError.
    """
    temporary = path.with_name(f".{secrets.token_hex(8)}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    return os.open(temporary, flags, 0o666), temporary


def write_whole(path: Path, content: str | bytes | Iterable[str]) -> Path:
    """Write `content` to a temporary file, then rename it to `path`. Text is written as UTF-8.

    content: the whole, or its parts in order. A symbolic link at `path` is replaced, not followed.
    Raises: DiskError if it cannot be written. `path` is then unchanged.
    """
    try:
        descriptor, temporary = create_temporary(path)
    except OSError as error:
        raise DiskError.refused(path, error) from error
    parts = [content] if isinstance(content, (str, bytes)) else content
    try:
        with os.fdopen(descriptor, "wb") as file:
            for part in parts:
                if isinstance(part, str):
                    part = part.encode("utf-8", errors="backslashreplace")  # noqa: PLW2901
                file.write(part)
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise DiskError.refused(path, error) from error
        raise
    return path


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

    Raises: UnreadableFileError if its digest is absent or does not match the content, or a number is missing.
    """
    return require_numbers(parse_record(kind, json.dumps(read_sealed_json(path)), path), path)


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
