"""Calls of GitHub's own program, `gh`."""

import json
import subprocess
from typing import Any

from assay.errors import MachineError

_SECONDS = 60


def gh(*arguments: str) -> str:
    """Run `gh ARGUMENTS`. Returns: its output.

    Raises: MachineError with its message if it is missing, fails or takes over a minute.
    """
    try:
        done = subprocess.run(
            ["gh", *arguments],  # noqa: S607 - found on PATH
            capture_output=True, text=True, check=False, timeout=_SECONDS,
        )  # fmt: skip
    except FileNotFoundError:
        raise MachineError("gh is not installed; GitHub-hosted machines have it") from None
    except subprocess.TimeoutExpired:
        raise MachineError(f"gh {arguments[0]} took over {_SECONDS} s") from None
    if done.returncode:
        raise MachineError(f"gh {' '.join(arguments[:2])} failed: {done.stderr.strip()}")
    return done.stdout


def read_gh(*arguments: str) -> list[dict[str, Any]]:
    """Run `gh ARGUMENTS`, which prints a JSON list of objects."""
    listed: list[dict[str, Any]] = json.loads(gh(*arguments))
    return listed


def last_success(workflow: str, branch: str) -> str:
    """Find the commit of the workflow's last successful run on `branch`; "" if there is none."""
    words = ("--workflow", workflow, "--branch", branch, "--status", "success", "--limit", "1")
    runs = read_gh("run", "list", *words, "--json", "headSha")
    return str(runs[0]["headSha"]) if runs else ""
