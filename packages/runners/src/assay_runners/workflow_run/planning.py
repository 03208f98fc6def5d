"""The plan of a workflow run: reads its event, and writes the outputs for later jobs."""

import json
from collections.abc import Mapping
from pathlib import Path

from assay.errors import MachineError, UsageError
from assay_runners.fleet.entries import Fleet
from assay_runners.planning.events import Event
from assay_runners.planning.plan import Plan
from assay_runners.planning.wording import summarize_plan
from assay_runners.workflow_run.events import read_event
from assay_runners.workflow_run.outputs import add_to_summary, write_outputs
from assay_runners.workflow_run.programs import files_changed_since, find_last_success


def read_planned_event(
    payload: Path | None,
    name: str | None,
    changed_since: str,
    unless_succeeded: str,
    fleet: Fleet,
    root: Path,
    variables: Mapping[str, str],
) -> Event:
    """Read the event, with the changed files and the last success where the plan depends on them.

    payload, name: as for `read_event`.
    changed_since: the commit to compare with. "" in the workflow run of a pull request is the protected
        branch, not the base of the pull request: on top of another pull request, a documentation-only
        change brings that one's code along when it is retargeted to main. "" elsewhere compares nothing.
    unless_succeeded: the workflow whose last successful run to look up; "" for none.
    Raises: UsageError if there is no event, or git does not know `changed_since`.
    """
    event = read_event(payload, name, variables)
    facts: dict[str, object] = {}
    in_run = payload is None and event.name == "pull_request"
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
