"""The commit of a checkout."""

import subprocess
from pathlib import Path

from assay.errors import UsageError


def run_git(folder: Path, *words: str) -> str:
    """What `git WORDS` prints there, without its last newline.

    Raises: UsageError with git's message if it fails.
    """
    done = subprocess.run(
        ["git", "-C", str(folder), *words],  # noqa: S607 - wherever the machine has it
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise UsageError(f"git {words[0]} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


def commit_of(folder: Path) -> str:
    """The 40 digits of the commit that is checked out there."""
    return run_git(folder, "rev-parse", "HEAD")
