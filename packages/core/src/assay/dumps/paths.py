"""Paths inside of a dump. A dump comes from another machine, so no path may leave its folder."""

from functools import lru_cache
from pathlib import Path

from assay.files import UnreadableFileError


def path_inside(root: Path, name: str) -> Path:
    """Return the path of the file `name` of the dump in the folder `root`.

    Raises: UnreadableFileError if it lies outside of the dump, through a link or its name.
    """
    path = root / name
    try:
        name.encode()
        is_plain = not (path.name == ".." or "\0" in name or path.is_symlink())
        resolved = _resolve(path.parent) / path.name if is_plain else path.resolve()
        is_inside = resolved.is_relative_to(_resolve(root))
    except UnicodeEncodeError:
        raise UnreadableFileError.of(path, "its name is not UTF-8") from None
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, or a NUL character
        raise UnreadableFileError.of(path, error) from None
    if not is_inside:
        raise UnreadableFileError.of(path, "it lies outside of the dump")
    return path


@lru_cache(maxsize=1024)
def _resolve(folder: Path) -> Path:
    """Resolve the links of a folder, which holds many files."""
    return folder.resolve()


def require_inside(root: Path, folder: Path) -> None:
    """Raise UnreadableFileError if `folder`, found below `root` or around it, lies elsewhere.

    root: the path that the user gave. It may be a link.
    """
    root = root.resolve()
    if folder.is_relative_to(root):
        path_inside(root, str(folder.relative_to(root)))
