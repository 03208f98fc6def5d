"""When a file changed, by whom and why, as git has it."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

_TIMEOUT_SECONDS = 20.0
_FIELDS = 3
_FORMAT = ("--date=short", "--format=%ad%x00%an%x00%s")


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit that changed a file; date: as YYYY-MM-DD."""

    date: str
    author: str
    subject: str


def commits_of(file: Path) -> list[Commit]:
    """Those that changed `file`, the newest first; none where it is not in a repository."""
    try:
        done = subprocess.run(
            ["git", "log", "--follow", *_FORMAT, "--", file.name],  # noqa: S607 - the user's git
            cwd=file.parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=_TIMEOUT_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split("\0") for line in done.stdout.splitlines()]
    return [Commit(*row) for row in rows if len(row) == _FIELDS]
