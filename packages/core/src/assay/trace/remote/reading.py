"""Copying the files behind a URL to a local folder."""

import os
import shutil
import tempfile
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePosixPath

from assay.files import Url
from assay.progress import subtask
from assay.trace.errors import TraceError, client_errors
from assay.trace.index import INDEX, MANIFEST
from assay.trace.remote.store import Store

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
