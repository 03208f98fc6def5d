"""The files below one URL."""

from pathlib import Path
from typing import Any

from assay.errors import UsageError
from assay.files import Url
from assay.trace.errors import TraceError, client_errors


class Store:
    """Reads and writes files below a URL by name, without retries.

    Raises: UsageError if the package for such URLs is not installed. Methods raise any exception of
        the storage's client.
    """

    def __init__(self, url: Url) -> None:
        import fsspec  # type: ignore[import-untyped]

        self.url = url
        with client_errors("open", url):
            try:
                # Listings are not cached: other processes write here, too.
                opened: tuple[Any, str] = fsspec.url_to_fs(str(url), use_listings_cache=False)
            except (ImportError, ValueError) as error:
                raise UsageError(f"{url} cannot be opened: {error}") from None
        self._files, root = opened
        self._root = root.rstrip("/")

    def top_names(self) -> list[str]:
        """Return the names of files and folders directly below the URL."""
        try:
            paths = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        return [name for path in paths if (name := self._relative(path))]

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of every file below the URL; "" is a file at the URL itself.

        Raises: TraceError if a name leads out of a folder.
        """
        found: dict[str, Any] = self._files.find(self._root, detail=True)
        sizes = {self._relative(path): int(about["size"] or 0) for path, about in found.items()}
        if len(sizes) > 1:
            sizes.pop("", None)
        for name in sizes:
            if ".." in Path(name).parts or Path(name).is_absolute():
                raise TraceError(
                    f"{self.url} holds {name!r}, which is not the name of a file in a folder"
                )
        return sizes

    def create(self, name: str, content: bytes) -> None:
        """Write a file that must not exist. Raises: FileExistsError if it does."""
        self._files.pipe_file(self._path(name), content, mode="create")

    def write(self, name: str, content: bytes) -> None:
        """Write a file, or replace it as a whole."""
        self._files.pipe_file(self._path(name), content)

    def upload(self, name: str, file: Path) -> None:
        """Copy a local file to `name`."""
        self._files.put_file(str(file), self._path(name))

    def download(self, name: str, file: Path) -> None:
        """Copy `name` to a local file; name: "" for the file at the URL itself."""
        self._files.get_file(self._path(name), str(file))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _relative(self, path: str) -> str:
        return path.rstrip("/").removeprefix(self._root).removeprefix("/")
