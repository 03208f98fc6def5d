"""A trace behind a URL: a local copy to read, and a local spool to write, whose finished files are uploaded."""

import os
import secrets
import shutil
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from assay.errors import UsageError
from assay.files import Url, parse_location
from assay.output.streams import print_error
from assay.progress import subtask
from assay.trace.files import (
    Folder,
    LineFile,
    OutStream,
    StorageError,
    TraceError,
    client_errors,
    error_in_words,
)
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


# Bytes of finished files that may wait for their upload: four shards. Temporary folders of training
# machines hold more. A slower network delays the model instead of filling them.
SPOOL_BYTES = 4 << 30

# Time limit for the upload of a file. Restarts of storage services and renewals of credentials
# take less.
RETRY_SECONDS = 120.0
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 15.0

# Each upload of the index is a whole one: at most one per second, and for a tenth of the time.
_INDEX_SECONDS = 1.0
_INDEX_PAUSE_RATIO = 9.0


class Uploader:
    """Uploads the files of one spool folder in the order in which they were finished.

    The stored index lists only stored files. When the upload of a file fails for `RETRY_SECONDS`, it
    prints one message and drops all further files.
    """

    def __init__(self, store: Store, spool: Path) -> None:
        self._store, self._spool = store, spool
        # Names of finished files, and sizes of the index after each line, in order.
        self._jobs: deque[str | int] = deque()
        self._spooled_bytes = 0
        self._is_closing = False
        self.has_failed = False
        self._changed = threading.Condition()
        self._index_bytes = self._stored_index_bytes = 0
        self._index_is_due = 0.0
        # A daemon, so that a process that never closes its trace can end.
        self._thread = threading.Thread(target=self._run, name="assay-upload", daemon=True)
        self._thread.start()

    def wait_for_room(self) -> None:
        """Wait until the spool has room for one more file."""
        with self._changed:
            self._changed.wait_for(lambda: self._spooled_bytes < SPOOL_BYTES or self.has_failed)

    def add_file(self, name: str) -> None:
        """Queue a finished file for upload and deletion from the spool."""
        self._add(name, (self._spool / name).stat().st_size)

    def add_line(self, index_bytes: int) -> None:
        """Queue the first `index_bytes` of the index, after the files added before."""
        self._add(index_bytes, 0)

    def _add(self, job: str | int, size_bytes: int) -> None:
        with self._changed:
            if not self.has_failed:
                self._jobs.append(job)
                self._spooled_bytes += size_bytes
                self._changed.notify_all()
                return
        if isinstance(job, str):
            (self._spool / job).unlink()

    def close(self) -> None:
        """Wait until everything is stored or dropped, and delete the spool."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join()
        shutil.rmtree(self._spool, ignore_errors=True)

    def _run(self) -> None:
        try:
            while self._do_next():
                pass
        except Exception as error:  # noqa: BLE001 - a client may raise anything; the user's loop goes on
            with self._changed:
                self.has_failed = True
                names = [job for job in self._jobs if isinstance(job, str)]
                self._jobs.clear()
                self._changed.notify_all()
            for name in names:
                (self._spool / name).unlink(missing_ok=True)
            print_error(
                f"assay: the capture ended, as {self._store.url} could not be written for"
                f" {RETRY_SECONDS:g} s: {error_in_words(error)}. What it lists up to here is intact."
            )

    def _do_next(self) -> bool:
        """Wait for a job or the next upload of the index. Returns: False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._is_closing, self._until_index())
            job = self._jobs.popleft() if self._jobs else None
            is_last = job is None and self._is_closing
        if isinstance(job, int):
            self._index_bytes = job
        if is_last or job == MANIFEST or self._until_index() == 0:
            self._store_index()
        if isinstance(job, str):
            self._store_file(job)
        return not is_last

    def _until_index(self) -> float | None:
        """Return the seconds until the next upload of the index; None if it has no new lines."""
        if self._index_bytes == self._stored_index_bytes:
            return None
        return max(0.0, self._index_is_due - time.monotonic())

    def _store_index(self) -> None:
        if self._index_bytes == self._stored_index_bytes:
            return
        with (self._spool / INDEX).open("rb") as file:
            content = file.read(self._index_bytes)
        started = time.monotonic()
        _persist(lambda: self._store.write(INDEX, content))
        ended = time.monotonic()
        self._stored_index_bytes = len(content)
        self._index_is_due = ended + max(_INDEX_SECONDS, _INDEX_PAUSE_RATIO * (ended - started))

    def _store_file(self, name: str) -> None:
        file = self._spool / name
        size = file.stat().st_size
        _persist(lambda: self._store.upload(name, file))
        file.unlink()
        with self._changed:
            self._spooled_bytes -= size
            self._changed.notify_all()


def _persist(action: Callable[[], None]) -> None:
    """Retry `action` until it succeeds. Raises: its last error after `RETRY_SECONDS`."""
    give_up = time.monotonic() + RETRY_SECONDS
    pause = _FIRST_PAUSE_SECONDS
    while True:
        try:
            return action()
        except Exception:
            if time.monotonic() + pause > give_up:
                raise
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def create_folder(folder: str | Path | Url) -> Folder:
    """Create the folder of a new trace, locally or behind a URL.

    Raises: TraceError if it is not empty, StorageError if it cannot be created or reached, UsageError
        if the package for such URLs is not installed.
    """
    location = parse_location(folder)
    return _RemoteFolder(location) if isinstance(location, Url) else Folder.create(location)


class _RemoteFolder(Folder):
    """A new trace behind a URL. The spool exists from `create_exclusive` to `LineFile.close`."""

    def __init__(self, url: Url) -> None:
        super().__init__(Path(tempfile.gettempdir(), f"assay-spool-{secrets.token_hex(8)}"))
        self._store = Store(url)
        with client_errors("open", url):
            if names := self._store.top_names():
                raise TraceError.not_empty(url, names)

    @property
    def is_lost(self) -> bool:
        return self._uploader.has_failed

    def create_exclusive(self, name: str, text: str) -> None:
        with client_errors("open", self._store.url):
            try:
                self._store.create(name, text.encode())
            except FileExistsError:
                raise TraceError.in_use(self._store.url) from None
        try:
            self.path.mkdir(mode=0o700)
        except OSError as error:
            raise StorageError.refused(self.path, "create the folder", error) from error
        self._uploader = Uploader(self._store, self.path)

    def stream(self, name: str) -> OutStream:
        self._uploader.wait_for_room()
        return _SpooledFile(self.path, name, self._uploader)

    def lines(self, name: str) -> LineFile:
        return _SpooledLines(self.path / name, self._uploader)


class _SpooledFile(OutStream):
    def __init__(self, spool: Path, name: str, uploader: Uploader) -> None:
        super().__init__(spool / name)
        self._name, self._uploader = name, uploader

    def commit(self) -> None:
        super().commit()
        self._uploader.add_file(self._name)


class _SpooledLines(LineFile):
    def __init__(self, path: Path, uploader: Uploader) -> None:
        super().__init__(path)
        self._size_bytes, self._uploader = 0, uploader

    def append(self, line: str) -> None:
        super().append(line)
        self._size_bytes += len(line.encode()) + 1
        self._uploader.add_line(self._size_bytes)

    def close(self) -> None:
        super().close()
        self._uploader.close()
