"""Calls of the programs git, gh and aws."""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from assay.errors import MachineError, UsageError

_INSTALL = {
    "aws": "install it from https://aws.amazon.com/cli",
    "gh": "install it from https://cli.github.com, run `gh auth login`, and repeat the command",
}


def run_program(*words: str, seconds: int = 60, env: Mapping[str, str] | None = None) -> str:
    """Run gh or aws. Returns: its output.

    Raises: MachineError with its message if it is missing, fails or takes longer than `seconds`.
    """
    call = " ".join(words[:3])
    if words[0] == "gh" and (server := os.environ.get("GITHUB_SERVER_URL")):
        # Elsewhere than on github.com, gh reads these two and not GH_TOKEN.
        token = os.environ.get("GH_TOKEN", "")
        host = server.removeprefix("https://")
        env = {**os.environ, "GH_HOST": host, "GH_ENTERPRISE_TOKEN": token}
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, timeout=seconds, env=env
        )
    except FileNotFoundError:
        raise MachineError(f"{words[0]} is not installed: {_INSTALL[words[0]]}") from None
    except subprocess.TimeoutExpired:
        raise MachineError(f"{call} took over {seconds} s") from None
    if done.returncode:
        raise MachineError(f"{call} failed: {done.stderr.strip()}")
    return done.stdout


def read_gh(*words: str) -> list[dict[str, Any]]:
    """Run `gh WORDS`, which prints a JSON list of objects."""
    listed: list[dict[str, Any]] = json.loads(run_program("gh", *words))
    return listed


def find_last_success(workflow: str, branch: str) -> str:
    """Find the commit of the workflow's last successful run on `branch`; "" if there is none."""
    words = ("--workflow", workflow, "--branch", branch, "--status", "success", "--limit", "1")
    runs = read_gh("run", "list", *words, "--json", "headSha")
    return str(runs[0]["headSha"]) if runs else ""


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
