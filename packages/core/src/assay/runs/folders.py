"""The folder of a run, the cache folder, and locks for writers of the cache."""

import fcntl
import json
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from assay.errors import UsageError
from assay.files import DiskError, UnreadableFileError, read_json_object, refuse_link, write_whole
from assay.runs.provenance import provenance

MARK = "run.json"
_VERDICT = "verdict.json"

_begun: list[Path] = []
_made: set[Path] = set()


class FolderError(UsageError):
    """An output folder that cannot be used for a new run."""

    @classmethod
    def not_empty(cls, folder: Path, held: str) -> "FolderError":
        """Make the error for a folder that holds `held`."""
        return cls(f"{folder} is not empty (it holds {held}): name a new folder with --output")

    @classmethod
    def unfinished(cls, folder: Path) -> "FolderError":
        """Make the error for the folder of a run that left no result."""
        return cls(
            f"{folder} holds a run without a result: it was refused or interrupted, or is still"
            " running. Name a new folder with --output"
        )

    @classmethod
    def in_use(cls, folder: Path) -> "FolderError":
        """Make the error for a folder that another run is writing to."""
        return cls(f"{folder} is in use by another run: name a new folder with --output")


def begun_folders() -> tuple[Path, ...]:
    """Return the folders of the runs that this process has begun, in order."""
    return tuple(_begun)


def remove_refused(error: UsageError) -> None:
    """Remove the folders of this process that hold no result, as `error` refused the run.

    A folder that the message names is kept with its logs, and so is one that existed before.
    """
    for path in [one for one in _begun if str(one) not in str(error)]:
        with suppress(OSError):
            files = list(path.iterdir())
            if all(file.name == MARK or file.suffix == ".log" for file in files):
                for file in files:
                    file.unlink()
                if path in _made:
                    path.rmdir()


@contextmanager
def removed_if_refused() -> Iterator[None]:
    """Call `remove_refused` if a UsageError leaves the context."""
    try:
        yield
    except UsageError as error:
        remove_refused(error)
        raise


class RunFolder:
    """The folder of one run, with its provenance in `run.json`; made by `create`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, command: str, output: str | Path | None = None) -> "RunFolder":
        """Make the folder `output`, by default runs/<time>-<command>, and write its `run.json`.

        Args:
            command: words of the command without options, such as "check generate".
            output: a folder that is empty or does not exist.

        Raises: FolderError if it holds anything, DiskError if it cannot be written.
        """
        path = _default_path(command) if output is None else Path(output)
        is_new = not path.exists()
        try:
            path.mkdir(parents=True, exist_ok=True)
            names = os.listdir(path)  # noqa: PTH208 - names only
        except FileExistsError:
            raise FolderError(f"{path} is not a folder: name another one with --output") from None
        except OSError as error:
            raise DiskError.refused(path, error) from error
        if names:
            if MARK in names and not _is_finished(path):
                raise FolderError.unfinished(path)
            held = "another run" if MARK in names else ", ".join(sorted(names)[:4])
            raise FolderError.not_empty(path, held)
        text = json.dumps({"run": command} | provenance(), indent=1) + "\n"
        try:
            with (path / MARK).open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise FolderError.in_use(path) from None
        except OSError as error:
            raise DiskError.refused(path / MARK, error) from error
        if is_new:
            _made.add(path)
        return cls._take(path)

    @classmethod
    def resume(cls, command: str, output: str | Path | None = None) -> "RunFolder":
        """Continue in the folder of an earlier run of `command`, or create the folder.

        Raises: FolderError if that run still writes to it, or as in `create`.
        """
        try:
            earlier = {} if output is None else read_json_object(refuse_link(Path(output) / MARK))
        except UnreadableFileError:
            earlier = {}
        if earlier.get("run") != command:
            return cls.create(command, output)
        return cls._take(Path(str(output)))

    @classmethod
    def _take(cls, path: Path) -> "RunFolder":
        """Lock the folder for as long as the returned object lives.

        Raises: FolderError if another run holds the lock.
        """
        folder = cls(path)
        lock = os.open(path / MARK, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(folder, os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderError.in_use(path) from None
        except OSError:  # a file system without locks
            pass
        _begun.append(path)
        return folder

    def write_text(self, name: str, text: str) -> Path:
        """Write a file of this folder, whole or not at all. Returns: its path. Raises: DiskError."""
        return write_whole(self.path / name, text)


def _is_finished(folder: Path) -> bool:
    """Return True if a run left a verdict, for itself or for its parts, or another record than its logs."""
    return any(folder.glob(f"**/{_VERDICT}")) or any(
        file.suffix in (".json", ".html", ".toml") and file.name != MARK
        for file in folder.iterdir()
    )


def _default_path(command: str) -> Path:
    name = f"{datetime.now().astimezone():%Y%m%d-%H%M%S}-{'-'.join(command.split())}"
    path, number = Path("runs", name), 1
    while path.exists():
        number += 1
        path = Path("runs", f"{name}-{number}")
    return path


def cache_folder() -> Path:
    """Return the user's cache folder of assay, which may not exist.

    Source: XDG Base Directory Specification 0.8, $XDG_CACHE_HOME; a relative path there is ignored.
    """
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "assay"


@contextmanager
def locked(lock: Path) -> Iterator[None]:
    """Exclude other processes that lock the same file; they wait. A kill frees the lock."""
    with lock.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
