"""Read foreign files within limits. All functions raise only `UnreadableFileError`."""

# ruff: noqa: ANN401 - JSON values

import json
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, Any, Self, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from assay.errors import UsageError, suggest
from assay.foreign_text import shorten

# JSON takes up to ten times its size as Python objects: a file at the limit stays below 1 GB.
MAX_TEXT_BYTES = 64 << 20
# tomllib reads about 1 MB/s.
MAX_TOML_BYTES = 1 << 20
MAX_LINE_BYTES = 16 << 20

# Python's recursion limit is 1,000 frames. Code that walks through a value needs several per level.
MAX_DEPTH = 100
# A value takes up to 40 bytes while it is read and hashed. A list takes four times that.
MAX_VALUES = 16 << 20
_VALUES_A_LIST = 4

_Model = TypeVar("_Model", bound=BaseModel)


class UnreadableFileError(UsageError):
    """Error for a file that is absent, too large, damaged, or has unexpected content."""

    @classmethod
    def of(cls, path: Path | str, problem: object, line: int | None = None) -> Self:
        """Make the error, with a message of one line.

        line: line number from 1; None for the whole file.
        """
        if isinstance(problem, OSError):
            problem = f"cannot be read: {problem.strerror or problem}"
        place = f"{path}, line {line}" if line else f"{path}"
        return cls(f"{place}: {shorten(problem)}")


# Texts of pydantic, in words that need no Python.
_SENTENCES = {
    re.compile(r"^Field required$"): "it is missing",
    re.compile(r"^Input should be a valid (tuple|list)$"): "it must be a list",
    re.compile(r"^Input should be a valid integer.*"): "it must be a whole number",
    re.compile(r"^Input should be a valid number.*"): "it must be a number",
    re.compile(r"^Input should be greater than or equal to "): "it must be at least ",
    re.compile(r"^Input should be less than or equal to "): "it must be at most ",
    re.compile(r"^Input should be "): "it must be ",
    re.compile(r"^\w+ should have at (least|most) (\d+ \w+) after validation, not (\d+)$"): (
        r"it needs at \1 \2, and has \3"
    ),
    re.compile(r"^String should match pattern '(.+)'$"): r"it must match \1",
}


def describe_problem(message: str) -> str:
    """Put a message of pydantic into words that need no Python."""
    problem = message.removeprefix("Value error, ")
    for pattern, words in _SENTENCES.items():
        problem = pattern.sub(words, problem)
    return problem


def describe_invalid(error: ValidationError, kind: type[BaseModel]) -> str:
    """Describe the first field that violates the schema of `kind`, and why."""
    errors = error.errors(include_url=False, include_context=False)
    # A misspelled key also makes the right key missing, but the misspelling says more.
    first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
    problem = describe_problem(first["msg"])
    *parents, last = first["loc"] or ("",)
    if first["type"] == "extra_forbidden":
        fields = _record_at(kind, parents).model_fields
        entries = first["input"] if isinstance(first["input"], list) else [first["input"]]
        what = "table" if any(isinstance(one, dict) for one in entries) else "key"
        known = [field.alias or name for name, field in fields.items()]
        problem = suggest(what, str(last), known)
    elif last == "[key]":
        *parents, name = parents
        problem = f"the name {name!r}: {problem}"
    elif isinstance(last, int) and isinstance(first["input"], str | int | float):
        problem = f"{first['input']!r}: {problem}"
    else:
        field = _record_at(kind, parents).model_fields.get(str(last))
        is_told = first["type"] in ("literal_error", "value_error")  # it lists the values
        if field is not None and field.description and not is_told:
            problem += f"; expected: {field.description}"
        parents.append(last)
    place = _describe_place(parents)
    return f"{place}: {problem}" if place else problem


def _record_at(kind: type[BaseModel], place: Iterable[str | int]) -> type[BaseModel]:
    """Return the kind of record at `place` in one of `kind`."""
    for part in place:
        for name, field in kind.model_fields.items():
            if part in (name, field.alias):
                kind = _record_in(field.annotation) or kind
                break
    return kind


def _record_in(annotation: Any) -> type[BaseModel] | None:
    """Return the kind of record in a type, such as that of `list[Point] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_record_in, get_args(annotation))), None)


def _describe_place(parts: Iterable[str | int]) -> str:
    """Join the keys of a place in a file. The entries of a list count from 1."""
    place = "".join(
        f", entry {part + 1}: " if isinstance(part, int) else f"{part}." for part in parts
    )
    return place.replace(".,", ",").strip(".,: ")


@contextmanager
def open_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a regular file for reading bytes. Opening never blocks.

    Raises: UnreadableFileError for an absent file, a folder, a FIFO or a device, and for a disk
        error while the file is open.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        raise UnreadableFileError.of(path, error) from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = "a folder" if stat.S_ISDIR(mode) else "a FIFO, a socket or a device"
        raise UnreadableFileError.of(path, f"it is {kind}, not a file")
    with os.fdopen(descriptor, "rb") as file:
        try:
            yield file
        except OSError as error:
            raise UnreadableFileError.of(path, error) from None


def refuse_link(path: Path) -> Path:
    """Return `path`, a file in the folder of a run.

    Raises: UnreadableFileError if it is a symbolic link. assay never writes links there.
    """
    if path.is_symlink():
        raise UnreadableFileError.of(
            path, "it is a symbolic link, which assay does not follow here"
        )
    return path


def read_bytes(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Read a whole file. Raises: UnreadableFileError if it is larger than `max_bytes`."""
    with open_file(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        limit = f"{max_bytes >> 20} MiB" if max_bytes >> 20 else f"{max_bytes >> 10} KiB"
        raise UnreadableFileError.of(path, f"it is larger than {limit}")
    return data


def read_pipe(path: Path) -> str:
    """Read UTF-8 from a pipe that the user named, as of <(COMMAND), until its end.

    Raises: UnreadableFileError if there is more than a file may hold.
    """
    try:
        with path.open("rb") as pipe:
            data = pipe.read(MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise UnreadableFileError.of(path, error) from None
    if len(data) > MAX_TEXT_BYTES:
        raise UnreadableFileError.of(path, f"it holds more than {MAX_TEXT_BYTES >> 20} MiB")
    return _decoded(path, data)


def read_text(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Read a whole file of UTF-8."""
    return _decoded(path, read_bytes(path, max_bytes))


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    r"""Read nonblank lines of UTF-8, numbered from 1.

    Only `\n` ends a line. U+2028, U+0085 and similar characters are content. The file may have any size.
    """
    with open_file(path) as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                problem = f"the line is longer than {MAX_LINE_BYTES >> 20} MiB"
                raise UnreadableFileError.of(path, problem, number)
            if line.strip():
                yield number, _decoded(path, line, number)


def read_json(path: Path) -> Any:
    """Read a JSON file."""
    return parse_json(read_text(path), path)


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object."""
    return _require_object(read_json(path), path)


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read a JSON Lines file of objects, each with its line number."""
    for number, line in read_lines(path):
        yield number, _require_object(parse_json(line, path, number), path, number)


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file."""
    text = read_text(path, MAX_TOML_BYTES)
    # tomllib takes time and memory quadratic in the number of parts of a dotted key.
    if any(len(_PART_OF_KEY.findall(part)) > MAX_DEPTH for part in re.split(r"[=,\n]", text)):
        raise UnreadableFileError.of(path, _TOO_DEEP)
    try:
        value = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        hint = "; a text needs quotes" if "Invalid value" in str(error) else ""
        raise UnreadableFileError.of(path, f"{_nested_or(error)}{hint}") from None
    _require_depth(text, value, path)
    return value


def read_record(kind: type[_Model], path: Path) -> _Model:
    """Read a JSON file that follows the schema of `kind`."""
    return parse_record(kind, read_text(path), path)


def read_toml_record(kind: type[_Model], path: Path) -> _Model:
    """Read a TOML file that follows the schema of `kind`."""
    return validate_record(kind, read_toml(path), path)


def validate_record(kind: type[_Model], value: object, path: Path | str) -> _Model:
    """Validate a value read from `path` as a record."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise UnreadableFileError.of(path, describe_invalid(error, kind)) from None


def require_numbers(record: _Model, path: Path | str) -> _Model:
    """Return a record of `path`, which assay wrote with all its numbers.

    Raises: UnreadableFileError if a number is missing: its default would pass for a measured value.
    """
    if name := _find_missing_number(record):
        problem = f"{name} is missing, unlike in this version of assay: write the file again"
        raise UnreadableFileError.of(path, problem)
    return record


def _find_missing_number(value: object) -> str | None:
    if isinstance(value, BaseModel):
        if missing := sorted(_numbers_of(type(value)) - value.model_fields_set):
            return missing[0]
        parts: Iterable[object] = value.__dict__.values()
    elif isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    else:
        return None
    return next(filter(None, map(_find_missing_number, parts)), None)


@cache
def _numbers_of(kind: type[BaseModel]) -> frozenset[str]:
    """Return the fields whose default is a number."""
    defaults = {name: field.default for name, field in kind.model_fields.items()}
    return frozenset(name for name, default in defaults.items() if type(default) in (int, float))


def read_record_lines(kind: type[_Model], path: Path) -> Iterator[_Model]:
    """Read a JSON Lines file whose lines follow the schema of `kind`."""
    for number, line in read_lines(path):
        yield parse_record(kind, line, path, number)


def parse_json(text: str, path: Path | str, line: int | None = None) -> Any:
    """Parse JSON. `path` and `line` name its place in the error."""
    _require_few_values(text, path, line)
    try:
        value = json.loads(text)
        if "\\ud" in text.lower():  # a lone surrogate can be neither written nor hashed
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise UnreadableFileError.of(path, f"not JSON: {_nested_or(error)}", line) from None
    _require_depth(text, value, path, line)
    return value


def parse_record(
    kind: type[_Model], text: str, path: Path | str, line: int | None = None
) -> _Model:
    """Parse JSON that follows the schema of `kind`. `path` and `line` name its place in the error."""
    _require_few_values(text, path, line)
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise UnreadableFileError.of(path, describe_invalid(error, kind), line) from None


def _decoded(path: Path, data: bytes, line: int | None = None) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UnreadableFileError.of(path, f"not UTF-8 at byte {error.start:,}", line) from None


def _require_object(value: object, path: Path, line: int | None = None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UnreadableFileError.of(path, "not a JSON object", line)
    return value


def _require_few_values(text: str, path: Path | str, line: int | None) -> None:
    num_values = text.count(",") + _VALUES_A_LIST * (text.count("[") + text.count("{"))
    if num_values > MAX_VALUES:
        raise UnreadableFileError.of(path, f"it holds more than {MAX_VALUES:,} values", line)


def _require_depth(text: str, value: object, path: Path | str, line: int | None = None) -> None:
    if text.count("[") + text.count("{") + text.count(".") <= MAX_DEPTH:
        return
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [item for parent in level for item in _items_of(parent)]
        if not level:
            return
    raise UnreadableFileError.of(path, _TOO_DEEP, line)


def _items_of(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


_PART_OF_KEY = re.compile(r"[^.\s]\s*\.")

_TOO_DEEP = f"nested deeper than {MAX_DEPTH} levels"


def _nested_or(error: Exception) -> object:
    return _TOO_DEEP if isinstance(error, RecursionError) else error
