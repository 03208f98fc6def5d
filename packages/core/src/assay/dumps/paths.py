"""Paths inside of a dump. A dump comes from another machine, so no path may leave its folder."""

from pathlib import Path

from assay.files import UnreadableFileError


def path_inside(root: Path, name: str) -> Path:
    """Return the path of the file `name` of the dump in the folder `root`.

    Raises: UnreadableFileError if it lies outside of the dump, through a link or its name.
    """
    path = root / name
    try:
        name.encode()
        is_inside = path.resolve().is_relative_to(root.resolve())
    except UnicodeEncodeError:
        raise UnreadableFileError.of(path, "its name is not UTF-8") from None
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, or a NUL character
        raise UnreadableFileError.of(path, error) from None
    if not is_inside:
        raise UnreadableFileError.of(path, "it lies outside of the dump")
    return path


def require_inside(root: Path, folder: Path) -> None:
    """Raise UnreadableFileError if `folder`, found below `root` or around it, lies elsewhere.

    root: the path that the user gave. It may be a link.
    """
    root = root.resolve()
    if folder.is_relative_to(root):
        path_inside(root, str(folder.relative_to(root)))
