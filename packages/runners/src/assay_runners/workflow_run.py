"""A workflow run on GitHub: its event, outputs and summary, and the programs git, gh and aws that it calls."""

import json
import os
import subprocess
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from assay.ci.planning import write_outputs
from assay.errors import MachineError, UsageError
from assay.files import read_json_object, validate_record
from assay.report.page.html import append_summary
from assay_runners.fleet import Fleet
from assay_runners.planning import Event, Plan, summarize_plan

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
    words = ("--name-only", "--no-renames", "-z", "--end-of-options", f"{base}...HEAD", "--")
    try:
        listed = run_git(root, "diff", *words)
    except UsageError:
        return None
    return tuple(filter(None, listed.split("\0")))


def run_variable(name: str, variables: Mapping[str, str]) -> str:
    """Read a variable that GitHub sets for every workflow run. Raises: UsageError outside a run."""
    if not variables.get(name):
        raise UsageError(f"{name} is not set: this command belongs to a workflow run")
    return variables[name]


def describe_run(variables: Mapping[str, str]) -> str:
    """Write the address and the commit of the workflow run. Raises: UsageError outside a run."""
    server, repository, run, sha = (
        run_variable(f"GITHUB_{name}", variables)
        for name in ("SERVER_URL", "REPOSITORY", "RUN_ID", "SHA")
    )
    return f"{server}/{repository}/actions/runs/{run}, commit {sha}"


def add_to_summary(markdown: str, variables: Mapping[str, str]) -> None:
    """Append to the step's summary. Outside a workflow run, do nothing."""
    if path := variables.get("GITHUB_STEP_SUMMARY"):
        append_summary(Path(path), f"{markdown.rstrip(chr(10))}\n\n")


_Object = dict[str, Any]

# The fields of a payload that a plan requires.
_NEEDED = {
    "pull_request": ("action", "pull_request.head.sha", "pull_request.state", "sender.type"),
    "push": ("ref",),
    "merge_group": ("action",),
    "workflow_dispatch": ("workflow", "ref"),
    "schedule": ("schedule",),
}


class _Side(BaseModel):
    repo: _Object | None = None


class _Label(BaseModel):
    name: str


class _PullRequest(BaseModel):
    user: _Object | None = None
    head: _Side = _Side()
    base: _Side = _Side()
    labels: list[_Label] | None = None


class _Payload(BaseModel):
    """The parts of a payload that `Event` and planning read."""

    pull_request: _PullRequest | None = None
    sender: _Object | None = None
    label: _Object | None = None
    inputs: _Object | None = None
    merge_group: _Object | None = None


def read_event(given: str, variables: Mapping[str, str]) -> Event:
    """Read the event of a run.

    given: a label, or the file of a recorded event: an object with `event_name`, `sha`, `ref`, `event` (the
        payload) and optionally `changed` (a list of files). "": the event of this run.
    variables: the environment of the run.
    Raises: UsageError if there is no event, or the file is not an event.
    """
    if not given:
        return _read_run_event(variables)
    file = Path(given)
    if file.suffix != ".json":
        return _give_label(given)
    return _require_fields(_read_recorded(read_json_object(file), file), file)


def _give_label(label: str) -> Event:
    """Make the event of a person who gives this label to an open pull request."""
    payload: _Object = {
        "action": "labeled",
        "label": {"name": label},
        "pull_request": {"state": "open", "head": {"sha": "HEAD"}},
        "sender": {"type": "User"},
    }
    return Event(name="pull_request", payload=payload, sha="HEAD")


def _read_run_event(variables: Mapping[str, str]) -> Event:
    path = variables.get("GITHUB_EVENT_PATH", "")
    if not path:
        raise UsageError("no event: name a label or the file of an event, or run inside a workflow")
    payload = read_json_object(Path(path))
    validate_record(_Payload, payload, path)
    return Event(
        name=variables.get("GITHUB_EVENT_NAME", ""),
        payload=payload,
        sha=variables.get("GITHUB_SHA", ""),
        ref=variables.get("GITHUB_REF", ""),
    )


def _require_fields(event: Event, file: Path) -> Event:
    """Return the event of a handwritten file. Raises: UsageError if a required field is missing."""
    near = get_close_matches(event.name, _NEEDED, n=1, cutoff=0.9)
    if event.name not in _NEEDED and near:
        raise UsageError(f"{file}: GitHub has no event {event.name!r}; nearest is {near[0]}")
    needed = _NEEDED.get(event.name, ())
    if event.name == "pull_request" and event.action in ("labeled", "unlabeled"):
        needed = (*needed, "label.name")
    for path in needed:
        value: Any = event.payload
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if not value:
            raise UsageError(f"{file}: a payload of {event.name} has {path}, and this one does not")
    return event


def _read_recorded(read: dict[str, Any], path: Path) -> Event:
    payload, changed = read.get("event"), read.get("changed")
    if "event_name" not in read or not isinstance(payload, dict):
        raise UsageError(f"{path}: a recorded event has `event_name`, and its payload in `event`")
    if changed is not None and not isinstance(changed, list):
        raise UsageError(f"{path}: `changed` is not a list of files")
    validate_record(_Payload, payload, path)
    return Event(
        name=str(read["event_name"]),
        payload=payload,
        sha=str(read.get("sha", "")),
        ref=str(read.get("ref", "")),
        changed=None if changed is None else tuple(map(str, changed)),
    )


def read_planned_event(
    given: str, unless_succeeded: str, fleet: Fleet, root: Path, variables: Mapping[str, str]
) -> Event:
    """Read the event, with the changed files and the last success where the plan depends on them.

    The workflow run of a pull request compares with the protected branch, not with the base of the pull
    request: on top of another pull request, a documentation-only change brings that one's code along when
    it is retargeted to main.
    given: as for `read_event`.
    unless_succeeded: the workflow whose last successful run to look up; "" for none.
    Raises: UsageError without an event.
    """
    event = read_event(given, variables)
    facts: dict[str, object] = {}
    if not given and event.name == "pull_request":
        facts["changed"] = files_changed_since(f"origin/{fleet.github.protected_ref}", root)
    if unless_succeeded:
        try:
            last = find_last_success(unless_succeeded, fleet.github.protected_ref)
        except MachineError:
            last = ""  # unknown: everything runs
        facts["unchanged_since_success"] = bool(event.sha) and last == event.sha
    return event.model_copy(update=facts)


def publish_plan(plan: Plan, variables: Mapping[str, str]) -> None:
    """Write the outputs for later jobs, and the summary. Outside a workflow run, do nothing."""
    lists = {"tiers": plan.tiers, "machines": plan.machines}
    outputs = {name: json.dumps([job.model_dump() for job in jobs]) for name, jobs in lists.items()}
    write_outputs(outputs, variables)
    add_to_summary(summarize_plan(plan), variables)
