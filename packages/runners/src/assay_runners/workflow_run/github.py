"""Asks and tells GitHub through its own program, `gh`."""

import json
import subprocess
from typing import Any

from assay.errors import MachineError

_SECONDS = 60


def gh(*arguments: str) -> str:
    """What `gh ARGUMENTS` prints.

    Raises: MachineError with its message if it is missing, fails or takes over a minute.
    """
    try:
        done = subprocess.run(
            ["gh", *arguments],  # noqa: S607 - wherever the machine has it
            capture_output=True, text=True, check=False, timeout=_SECONDS,
        )  # fmt: skip
    except FileNotFoundError:
        raise MachineError("gh is not installed; GitHub's own machines have it") from None
    except subprocess.TimeoutExpired:
        raise MachineError(f"gh {arguments[0]} took over {_SECONDS} s") from None
    if done.returncode:
        raise MachineError(f"gh {' '.join(arguments[:2])} failed: {done.stderr.strip()}")
    return done.stdout


def read_gh(*arguments: str) -> list[dict[str, Any]]:
    """The JSON that `gh ARGUMENTS` prints: a list of objects."""
    listed: list[dict[str, Any]] = json.loads(gh(*arguments))
    return listed


def last_success(workflow: str, branch: str) -> str:
    """The commit of the workflow's last successful run on `branch`; "" where there was none."""
    words = ("--workflow", workflow, "--branch", branch, "--status", "success", "--limit", "1")
    runs = read_gh("run", "list", *words, "--json", "headSha")
    return str(runs[0]["headSha"]) if runs else ""
