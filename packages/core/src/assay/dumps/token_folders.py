"""Dumps by msit and msprobe for Ascend devices: `PROCESS/TOKEN/CALL/`."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from assay.dumps.protocol import DumpError
from assay.dumps.reading import require_inside

_TOKEN = re.compile(r"[0-9]{1,9}")

Processes = list[tuple[Path, list[Path]]]
"""Each process folder with its token folders."""


def find_processes(
    path: Path, patterns: Iterable[str], is_call: Callable[[Path], bool]
) -> Processes:
    """Return `path` and its subfolders that match `patterns`, each with its token folders, in order.

    path: a folder around processes, a process folder, or a token folder.
    is_call: recognizes a call folder by its name.
    """

    def is_token(folder: Path) -> bool:
        return bool(_TOKEN.fullmatch(folder.name)) and any(
            is_call(call) and call.is_dir() for call in folder.glob("*")
        )

    path = path.resolve()
    if is_token(path):
        return [(path.parent, [path])]
    folders = {path, *(folder for pattern in patterns for folder in path.glob(pattern))}
    return [
        (folder, sorted(filter(is_token, folder.glob("[0-9]*")), key=natural_order))
        for folder in sorted(folders, key=natural_order)
    ]


def find_root(path: Path, processes: Processes) -> Path:
    """Return the parent folder of all processes.

    Raises: DumpError if they have several, UnreadableFileError if a process lies outside of `path`.
    """
    roots = sorted({process.parent for process, _ in processes})
    if len(roots) > 1:
        names = (str(root.relative_to(path.resolve())) for root in roots)
        raise DumpError.of_several(path, "dumps", names)
    for process, _ in processes:
        require_inside(path, process)
    return roots[0]


def natural_order(path: Path | str) -> tuple[list[tuple[int, str]], str]:
    """Return a key that sorts npu2 before npu10."""
    name = str(path)
    parts = re.findall("[0-9]{1,18}|[^0-9]+", name)
    return [(int(part), "") if part[0] in "0123456789" else (-1, part) for part in parts], name
