"""Reads the event that started a workflow run, or one that was recorded."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from assay.errors import UsageError
from assay_runners.planning.events import Event

_GIT_SECONDS = 60


def read_event(file: Path | None, name: str | None, variables: Mapping[str, str]) -> Event:
    """The event of a run.

    file: a payload, or a recorded event: an object with `event_name`, `sha`, `ref`, `event` (the
        payload) and, where it matters, `changed` (a list of files). Default: GITHUB_EVENT_PATH.
    name: the event's name, for a payload alone. Default: GITHUB_EVENT_NAME.
    variables: the environment of the run.
    Raises: UsageError if there is no event, or the file is none.
    """
    path = file or Path(variables.get("GITHUB_EVENT_PATH", ""))
    if path == Path():
        raise UsageError("no event: name one with --payload, or run inside of a workflow")
    read = _read_object(path)
    if "event_name" in read:
        return _recorded(read, path)
    name = name or variables.get("GITHUB_EVENT_NAME", "")
    if not name:
        raise UsageError(f"{path} is a payload alone: name its event with --event")
    return Event(
        name=name,
        payload=read,
        sha=variables.get("GITHUB_SHA", ""),
        ref=variables.get("GITHUB_REF", ""),
    )


def _recorded(read: dict[str, Any], path: Path) -> Event:
    payload, changed = read.get("event"), read.get("changed")
    if not isinstance(payload, dict):
        raise UsageError(f"{path}: a recorded event has its payload in `event`, an object")
    if changed is not None and not isinstance(changed, list):
        raise UsageError(f"{path}: `changed` is no list of files")
    return Event(
        name=str(read["event_name"]),
        payload=payload,
        sha=str(read.get("sha", "")),
        ref=str(read.get("ref", "")),
        changed=None if changed is None else tuple(map(str, changed)),
    )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as an event: {error}") from error
    if not isinstance(read, dict):
        raise UsageError(f"{path} is no event: it holds no object")
    return read


def files_changed_since(base: str, root: Path) -> tuple[str, ...] | None:
    """The files of the checkout that differ from where it left `base`; None if git cannot tell.

    Not knowing is no failure: everything runs then.
    """
    if not base:
        return None
    command = ["git", "-C", str(root), "diff", "--name-only", "--no-renames", "-z"]
    try:
        done = subprocess.run(
            [*command, "--end-of-options", f"{base}...HEAD", "--"],
            capture_output=True, text=True, check=True, timeout=_GIT_SECONDS,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return tuple(filter(None, done.stdout.split("\0")))
