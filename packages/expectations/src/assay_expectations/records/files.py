"""Reader and writer of expectation files, in a layout that people can review."""

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
    """Return `output` if it is a file, or the file in the folder `output` that the key names."""
    return output if output.suffix == ".json" else output / f"{expectation.name}.json"


def require_writable(output: Path) -> None:
    """Raise DiskError early if a file cannot be written to `output`."""
    folder = output.parent if output.suffix == ".json" else output
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise DiskError.refused(folder, error) from error


def write_expectation(expectation: Expectation, output: Path) -> Path:
    """Write an expectation to a file or folder. Returns: the file. Raises: DiskError."""
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
        problem = (
            f"its schema is {schema!r}, but this assay reads schema {SCHEMA}: capture it again"
        )
        raise UnreadableFileError.of(path, problem)
    expectation = validate_record(Expectation, record, path)
    if expectation.hash != expectation.content_hash():
        raise UnreadableFileError.of(path, "its hash does not match its content")
    return expectation


def _as_lines(value: Any, indent: str) -> str:  # noqa: ANN401 - any JSON value
    """Format JSON with one line per list, and per object that fits into a line."""
    line = json.dumps(value)
    if not isinstance(value, dict) or len(indent) + len(line) <= _WIDTH:
        return line
    inner = indent + " "
    items = [f"{inner}{json.dumps(name)}: {_as_lines(item, inner)}" for name, item in value.items()]
    return "{\n" + ",\n".join(items) + f"\n{indent}}}"
