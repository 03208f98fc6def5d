"""Plans of pull request events."""

from collections.abc import Sequence
from pathlib import PurePosixPath

from assay_runners.fleet.entries import Fleet
from assay_runners.planning.choices import (
    BEFORE_MACHINES,
    FIRST_TIERS,
    ON_THE_CPU,
    choose_calls,
    machine_job,
    plan_nothing,
    plan_refusal,
    tier_jobs,
)
from assay_runners.planning.events import Event
from assay_runners.planning.labels import read_label
from assay_runners.planning.plan import Plan, Refusal

DOCUMENTATION = "nothing to do: only documentation changed"


def plan_pull_request(event: Event, fleet: Fleet) -> Plan:
    """Plan the first tiers for a new commit, machines for a label, and nothing otherwise."""
    if event.action == "labeled":
        return _plan_label(event, fleet)
    if event.action not in ("opened", "synchronize", "reopened"):
        return plan_nothing(event, f"no workflow waits for a pull request that is {event.action}")
    if only_documentation(event.changed):
        return plan_nothing(event, DOCUMENTATION)
    return plan_first_tiers(event, fleet)


def plan_first_tiers(event: Event, fleet: Fleet) -> Plan:
    """Plan all sessions that need no accelerator, then an abbreviated training on the CPU."""
    tiers = tier_jobs(FIRST_TIERS, fleet.github.pythons)
    return Plan(event=event.name, sha=event.sha, tiers=tiers, afterwards=ON_THE_CPU)


def only_documentation(changed: Sequence[str] | None) -> bool:
    """Check that every changed file is documentation. False if unknown, or if no file changed."""
    return bool(changed) and all(map(is_documentation, changed or ()))


def is_documentation(path: str) -> bool:
    """Check that `path` is Markdown at the root or below docs/. Programs read the other files there."""
    file = PurePosixPath(path)
    return file.suffix == ".md" and (len(file.parts) == 1 or file.parts[0] == "docs")


def _plan_label(event: Event, fleet: Fleet) -> Plan:
    asked = read_label(event.label, fleet)
    if asked is None:
        return plan_nothing(event, f"the label {event.label!r} asks for no machine")
    if isinstance(asked, Refusal):
        return plan_refusal(event, asked)
    tier, runners = asked
    if why := _keep_from_machines(event):
        return plan_refusal(event, Refusal(asked=event.label, why=why))
    if only_documentation(event.changed):
        return plan_nothing(event, DOCUMENTATION)
    why = f"the label {event.label}"
    return Plan(
        event=event.name,
        sha=event.head_sha,
        tiers=tier_jobs(BEFORE_MACHINES, fleet.github.pythons[:1]),
        machines=tuple(
            machine_job(runner, tier, choose_calls(tier, runner), why) for runner in runners
        ),
    )


def _keep_from_machines(event: Event) -> str:
    """Say why no machine may run code of this pull request; "" if one may."""
    if event.pull_request.get("state") != "open":
        return "the pull request is closed"
    if event.sender.get("type") != "User":
        return "a program gave the label: a person has to ask for a machine"
    author = (event.pull_request.get("user") or {}).get("login", "")
    if event.is_from_fork and event.sender.get("login", "").casefold() == author.casefold():
        return "the author of a fork gave the label: somebody else has to look at the commit first"
    return ""
