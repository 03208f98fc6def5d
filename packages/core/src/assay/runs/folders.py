"""The folder of a run: each run writes into a new one."""

import json
import os
from datetime import datetime
from pathlib import Path

from assay.runs.errors import DiskError, FolderError
from assay.runs.provenance import provenance

MARK = "run.json"
_VERDICT = "verdict.json"

_begun: list[Path] = []


def begun_folders() -> tuple[Path, ...]:
    """The folders of the runs that this process has begun, in their order."""
    return tuple(_begun)


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
        try:
            path.mkdir(parents=True, exist_ok=True)
            names = os.listdir(path)  # noqa: PTH208 - names only
        except OSError as error:
            raise DiskError.refused(path, error) from error
        if names:
            if MARK in names and _VERDICT not in names:
                raise FolderError.without_verdict(path)
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
        _begun.append(path)
        return cls(path)

    @classmethod
    def resume(cls, command: str, output: str | Path | None = None) -> "RunFolder":
        """The folder of an earlier run of `command`, whose files may be used again; else as `create`.

        Raises: as `create`, for a folder of anything else.
        """
        mark = None if output is None else Path(output) / MARK
        try:
            earlier = None if mark is None else json.loads(mark.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            earlier = None
        if not isinstance(earlier, dict) or earlier.get("run") != command:
            return cls.create(command, output)
        path = Path(str(output))
        (path / _VERDICT).unlink(missing_ok=True)
        _begun.append(path)
        return cls(path)

    def write_text(self, name: str, text: str) -> Path:
        """Write a file of this folder, whole or not at all. Returns its path.

        Raises: DiskError if it cannot be written.
        """
        return write_whole(self.path / name, text)


def write_whole(path: Path, text: str) -> Path:
    """Write `path` under another name and rename it, so that readers get the old or the new text.

    Raises: DiskError if it cannot be written.
    """
    temporary = path.with_name(path.name + ".part")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DiskError.refused(path, error) from error
    return path


def _default_path(command: str) -> Path:
    name = f"{datetime.now().astimezone():%Y%m%d-%H%M%S}-{'-'.join(command.split())}"
    path, number = Path("runs", name), 1
    while path.exists():
        number += 1
        path = Path("runs", f"{name}-{number}")
    return path
