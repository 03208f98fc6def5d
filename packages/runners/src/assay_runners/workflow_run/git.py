"""Asks and tells git about a checkout."""

import subprocess
from pathlib import Path

from assay.errors import UsageError


def run_git(folder: Path, *words: str) -> str:
    """What `git WORDS` prints there, without its last newline.

    Raises: UsageError with git's message if it fails, or there is none.
    """
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],  # noqa: S607 - wherever the machine has it
            capture_output=True, text=True, errors="replace", check=False,
        )  # fmt: skip
    except OSError as error:
        raise UsageError(f"git cannot be started: {error}") from None
    if done.returncode:
        raise UsageError(f"git {words[0]} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.removesuffix("\n")


def commit_of(folder: Path) -> str:
    """The 40 digits of the commit that is checked out there."""
    return run_git(folder, "rev-parse", "HEAD")


def files_changed_since(base: str, root: Path) -> tuple[str, ...] | None:
    """The files of the checkout that differ from where it left `base`; None if git cannot tell.

    Not knowing is no failure: everything runs then.
    """
    if not base:
        return None
    words = ("--name-only", "--no-renames", "-z", "--end-of-options", f"{base}...HEAD", "--")
    try:
        listed = run_git(root, "diff", *words)
    except UsageError:
        return None
    return tuple(filter(None, listed.split("\0")))
