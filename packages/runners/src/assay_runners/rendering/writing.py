"""Updates the rendered files below `runners/`, and finds those that are out of date."""

import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from assay_runners.fleet.entries import Fleet
from assay_runners.rendering.files import FOLDER, render_fleet

# The head of every rendered file. A file without it is never deleted.
HEADER = "Rendered by `assay runners render`: edit runners/*.toml or its template, not this file."
# A script starts with its interpreter, XML with its version.
_LINES_WITH_HEADER = 3


def write_rendered(root: Path, fleet: Fleet) -> list[PurePosixPath]:
    """Write the rendered files below `root`, and delete those of removed entries.

    Returns: the changed, created and deleted files, relative to `root`.
    """
    rendered = render_fleet(fleet)
    outdated = sorted(find_outdated(root, fleet))
    for path in outdated:
        file = root / path
        if path in rendered:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(rendered[path], encoding="utf-8", newline="\n")
            file.chmod(0o755 if file.suffix == ".sh" else 0o644)
        else:
            file.unlink()
            if not any(file.parent.iterdir()):
                file.parent.rmdir()
    return outdated


def find_outdated(root: Path, fleet: Fleet) -> dict[PurePosixPath, str]:
    """Find the rendered files below `root` that are out of date. Returns: each problem, by path."""
    rendered = render_fleet(fleet)
    differing = {
        path: difference
        for path, text in rendered.items()
        if (difference := _find_difference(root / path, text))
    }
    stale = {path: "no entry renders it" for path in _find_rendered(root) if path not in rendered}
    return differing | stale


def _find_difference(file: Path, text: str) -> str:
    """Say how `file` differs from the rendered `text`; "" if it does not."""
    if not file.is_file():
        return "it is missing"
    if file.read_bytes() != text.encode():
        return "it differs from its entry"
    if file.suffix == ".sh" and not file.stat().st_mode & stat.S_IXUSR:
        return "it is not executable"
    return ""


def _find_rendered(root: Path) -> Iterator[PurePosixPath]:
    """Yield the files below `runners/` with the header."""
    for file in sorted((root / FOLDER).rglob("*")):
        if file.is_file() and not file.is_symlink():
            with file.open("rb") as content:
                head = b"".join(content.readline() for _ in range(_LINES_WITH_HEADER))
            if HEADER.encode() in head:
                yield PurePosixPath(file.relative_to(root).as_posix())
