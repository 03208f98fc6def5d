"""Recognizing the format of a dump."""

from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

from assay.dumps.protocol import Dump, DumpError, Reader

# The group of entry points by which other packages add readers.
GROUP = "assay.readers"


@cache
def readers() -> tuple[Reader, ...]:
    """Return all readers, in the order in which they are asked."""
    return tuple(entry.load()() for entry in sorted(entry_points(group=GROUP), key=_rank))


def _rank(entry: object) -> tuple[bool, str]:
    # Plain folders of tensors last: dumps of other formats consist of such files too.
    name: str = entry.name  # type: ignore[attr-defined]
    return name == "tensors", name


def open_dump(path: str | Path, format_name: str | None = None) -> Dump:
    """Open a dump of any known format.

    format_name: the format, or None to recognize it.
    Raises: DumpError if no reader recognizes `path`, UnreadableFileError if the dump is damaged.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise DumpError(f"there is no file or folder {path}")
    for reader in readers():
        if format_name in (None, reader.name) and reader.recognize(path):
            return reader.open(path)
    names = ", ".join(reader.name for reader in readers())
    if format_name is not None and format_name not in names.split(", "):
        raise DumpError(f"unknown format {format_name!r}; known: {names}")
    kind = f"not a dump of format {format_name}" if format_name else "not a dump of a known format"
    raise DumpError(f"{path} is {kind}; known formats: {names}")
