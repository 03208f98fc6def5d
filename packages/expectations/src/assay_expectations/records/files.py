"""Files of expectations: written so that a person can review a change, read with one clear error."""

import json
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from assay.files import (
    DiskError,
    UnreadableFileError,
    read_json_object,
    validate_record,
    write_whole,
)
from assay_expectations.records.expectation import SCHEMA, Expectation

_WIDTH = 100


def file_for(expectation: Expectation, output: Path) -> Path:
    """The file `output`; where that is a folder, one in it that is named by the key."""
    return output if output.suffix == ".json" else output / f"{expectation.name}.json"


def require_writable(output: Path) -> None:
    """Make sure that a file can be written to `output`, before anything takes long.

    Raises: DiskError.
    """
    folder = output.parent if output.suffix == ".json" else output
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise DiskError.refused(folder, error) from error


def write_expectation(expectation: Expectation, output: Path) -> Path:
    """Write `expectation` to `file_for` it and `output`.

    Returns: the file.
    Raises: DiskError if it cannot be written.
    """
    sealed = expectation.model_copy(update={"hash": expectation.content_hash()})
    path = file_for(expectation, output)
    record = sealed.model_dump(mode="json", by_alias=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DiskError.refused(path.parent, error) from error
    return write_whole(path, _as_lines(record, "") + "\n")


def read_expectation(path: Path) -> Expectation:
    """Read the expectation in `path`. Raises: UnreadableFileError."""
    record = read_json_object(path)
    if (schema := record.get("schema")) != SCHEMA:
        problem = f"its schema is {schema!r}, this assay reads {SCHEMA}: capture it again"
        raise UnreadableFileError.of(path, problem)
    expectation = validate_record(Expectation, record, path)
    if expectation.hash != expectation.content_hash():
        raise UnreadableFileError.of(path, "its hash is not that of its content")
    return expectation


def _as_lines(value: Any, indent: str) -> str:  # noqa: ANN401 - any JSON value
    """JSON with one line for each list of numbers, and for each object that fits into one."""
    line = json.dumps(value)
    if not isinstance(value, dict) or len(indent) + len(line) <= _WIDTH:
        return line
    inner = indent + " "
    items = [f"{inner}{json.dumps(name)}: {_as_lines(item, inner)}" for name, item in value.items()]
    return "{\n" + ",\n".join(items) + f"\n{indent}}}"
