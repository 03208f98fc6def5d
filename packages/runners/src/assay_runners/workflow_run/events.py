"""Reads the event of a workflow run, or a recorded event, and publishes the plan of its jobs."""

import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from assay.errors import MachineError, UsageError
from assay.files import read_json_object, validate_record
from assay_runners.fleet.entries import Fleet
from assay_runners.planning.events import Event
from assay_runners.planning.plan import Plan, summarize_plan
from assay_runners.workflow_run.outputs import add_to_summary, write_outputs
from assay_runners.workflow_run.programs import files_changed_since, find_last_success

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
    given: str,
    changed_since: str,
    unless_succeeded: str,
    fleet: Fleet,
    root: Path,
    variables: Mapping[str, str],
) -> Event:
    """Read the event, with the changed files and the last success where the plan depends on them.

    given: as for `read_event`.
    changed_since: the commit to compare with. "" in the workflow run of a pull request is the protected
        branch, not the base of the pull request: on top of another pull request, a documentation-only
        change brings that one's code along when it is retargeted to main. "" elsewhere compares nothing.
    unless_succeeded: the workflow whose last successful run to look up; "" for none.
    Raises: UsageError if there is no event, or git does not know `changed_since`.
    """
    event = read_event(given, variables)
    facts: dict[str, object] = {}
    in_run = not given and event.name == "pull_request"
    base = changed_since or (f"origin/{fleet.github.protected_ref}" if in_run else "")
    if changed_since or (base and event.changed is None):
        facts["changed"] = files_changed_since(base, root)
        if changed_since and facts["changed"] is None:
            raise UsageError(f"--changed-since {changed_since}: git knows no such commit in {root}")
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
