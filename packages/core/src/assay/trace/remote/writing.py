"""Writing a trace behind a URL: a local spool, whose finished files are uploaded."""

import secrets
import tempfile
from pathlib import Path

from assay.files import Url, parse_location
from assay.trace.errors import StorageError, TraceError, client_errors
from assay.trace.files import Folder, LineFile, OutStream
from assay.trace.remote.store import Store
from assay.trace.remote.uploading import Uploader


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
