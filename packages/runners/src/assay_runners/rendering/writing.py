"""Brings the files below `runners/` to what the entries say, and tells where they are not."""

import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from assay_runners.fleet.entries import Fleet
from assay_runners.rendering.files import FOLDER, render_fleet

# Stands at the head of every rendered file; a file without it is never deleted.
HEADER = "Rendered by `assay runners render`: edit runners/*.toml or its template, not this file."
# A script begins with its interpreter, XML with its version.
_LINES_WITH_HEADER = 3


def write_rendered(root: Path, fleet: Fleet) -> list[PurePosixPath]:
    """Write what `fleet` gives below `root`, and delete what was rendered before and is no more.

    Returns: what changed, was made or deleted, relative to `root`; nothing the second time.
    """
    rendered = render_fleet(fleet)
    changed = [path for path, text in rendered.items() if _difference(root / path, text)]
    for path in changed:
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(rendered[path], encoding="utf-8", newline="\n")
        file.chmod(0o755 if file.suffix == ".sh" else 0o644)
    stale = [path for path in _rendered_before(root) if path not in rendered]
    for path in stale:
        (root / path).unlink()
        folder = (root / path).parent
        if not any(folder.iterdir()):
            folder.rmdir()
    return sorted([*changed, *stale])


def find_outdated(root: Path, fleet: Fleet) -> dict[PurePosixPath, str]:
    """What is wrong with a file below `root`, by its path: it is missing, differs, or is of no entry."""
    rendered = render_fleet(fleet)
    differing = {
        path: difference
        for path, text in rendered.items()
        if (difference := _difference(root / path, text))
    }
    stale = {
        path: "it is of no entry any more"
        for path in _rendered_before(root)
        if path not in rendered
    }
    return differing | stale


def _difference(file: Path, text: str) -> str:
    """What is wrong with `file`, which has to hold `text`; "" where nothing is."""
    if not file.is_file():
        return "it is not there"
    if file.read_bytes() != text.encode():
        return "it is not what its entry gives"
    if file.suffix == ".sh" and not file.stat().st_mode & stat.S_IXUSR:
        return "it is not executable"
    return ""


def _rendered_before(root: Path) -> Iterator[PurePosixPath]:
    """The files below `runners/` that have the header."""
    for file in sorted((root / FOLDER).rglob("*")):
        if file.is_file() and not file.is_symlink():
            with file.open("rb") as content:
                head = b"".join(content.readline() for _ in range(_LINES_WITH_HEADER))
            if HEADER.encode() in head:
                yield PurePosixPath(file.relative_to(root).as_posix())
