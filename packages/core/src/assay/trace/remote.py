"""The files below one URL, and a local copy of them."""

import os
import shutil
import tempfile
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from assay.errors import UsageError
from assay.files import Url
from assay.progress import subtask
from assay.trace.errors import TraceError, client_errors
from assay.trace.index import INDEX, MANIFEST


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


# Files to fetch at a time: one stream does not use the whole network bandwidth of a machine.
_STREAMS = 8

_HEADS = (MANIFEST, INDEX)


class RemoteCopy:
    """A local copy of the files below a URL. They are deleted with this object."""

    def __init__(self, url: Url) -> None:
        """Fetch all files.

        Raises: TraceError if there are none, StorageError if they cannot be fetched, UsageError if
            the package for such URLs is not installed.
        """
        self.url = url
        folder = Path(tempfile.mkdtemp(prefix="assay-fetched-"))
        weakref.finalize(self, _remove, folder, os.getpid())
        self.path = folder / PurePosixPath(str(url)).name
        store = Store(url)
        with client_errors("fetch", url):
            self._fetch(store)

    def _fetch(self, store: Store) -> None:
        # A running capture stores the files of a line before the line, and lines before the last
        # manifest. Fetching in the opposite order finds all files of the index.
        heads = [name for name in store.sizes() if PurePosixPath(name).name in _HEADS]
        for name in sorted(heads, key=lambda name: _HEADS.index(PurePosixPath(name).name)):
            self._fetch_file(store, name)
        sizes = store.sizes()
        if not sizes:
            raise TraceError(f"there is no file or folder {store.url}")
        rest = {name: size for name, size in sizes.items() if name not in heads}
        with (
            subtask(f"fetches {store.url}", sum(rest.values()), "bytes") as task,
            ThreadPoolExecutor(_STREAMS) as pool,
        ):
            for size, _ in zip(
                rest.values(), pool.map(partial(self._fetch_file, store), rest), strict=True
            ):
                task.advance(size)

    def _fetch_file(self, store: Store, name: str) -> None:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        store.download(name, file)

    def name_in(self, text: str) -> str:
        """Replace the path of the copy in a message by its URL."""
        return text.replace(str(self.path), str(self.url))


def list_names(url: Url) -> list[str]:
    """Return the names of all files below a URL. Raises: as `RemoteCopy`."""
    store = Store(url)
    with client_errors("read", url):
        return list(store.sizes())


def _remove(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked process has no copy of its own
        shutil.rmtree(folder, ignore_errors=True)
