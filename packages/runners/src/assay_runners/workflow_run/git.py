"""Calls of git."""

import subprocess
from pathlib import Path

from assay.errors import UsageError


def run_git(folder: Path, *words: str) -> str:
    """Run `git WORDS`. Returns: its output without the last newline.

    Raises: UsageError with git's message if it fails or is not installed.
    """
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],  # noqa: S607 - found on PATH
            capture_output=True, text=True, errors="replace", check=False,
        )  # fmt: skip
    except OSError as error:
        raise UsageError(f"git cannot be started: {error}") from None
    if done.returncode:
        raise UsageError(f"git {words[0]} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.removesuffix("\n")


def files_changed_since(base: str, root: Path) -> tuple[str, ...] | None:
    """List the files that changed since the checkout branched off `base`.

    Returns: None if git cannot tell; then everything runs.
    """
    if not base:
        return None
    words = ("--name-only", "--no-renames", "-z", "--end-of-options", f"{base}...HEAD", "--")
    try:
        listed = run_git(root, "diff", *words)
    except UsageError:
        return None
    return tuple(filter(None, listed.split("\0")))
