"""All jobs that GitHub should start for an event: the planned ones and those around them.

`nox -s runners` compares them with the committed workflows, evaluated by GitHub's own parser.
"""

from collections.abc import Callable, Iterator

from pydantic import BaseModel, ConfigDict

from assay_runners.fleet.entries import Fleet
from assay_runners.planning.events import Event
from assay_runners.planning.plan import Plan

Permissions = dict[str, str]

_READ: Permissions = {"contents": "read"}


class StartedJob(BaseModel):
    """A job as GitHub lists it."""

    model_config = ConfigDict(frozen=True)

    workflow: str
    job: str
    """Its id; for a job of a called workflow "CALLER / CALLED"."""
    group: str = ""
    """Its runner group; "" for GitHub-hosted machines."""
    labels: tuple[str, ...]
    sha: str = ""
    """The commit that it checks out; "" if it checks out nothing."""
    permissions: Permissions = {}
    environment: str = ""


def started_jobs(event: Event, plan: Plan, fleet: Fleet) -> list[StartedJob]:
    """Return the jobs of `plan`, and those that plan, collect and report."""
    rule = _RULES.get(event.name)
    return list(rule(event, plan, fleet)) if rule else []


def _of_pull_request(event: Event, plan: Plan, fleet: Fleet) -> Iterator[StartedJob]:
    if event.action == "labeled" and _may_ask_for_a_machine(event.label):
        yield _plan_job("smoke.yml", event.head_sha, fleet)
        yield from _planned("smoke.yml", plan, fleet)
    elif event.action in ("opened", "synchronize", "reopened"):
        yield from _of_ci(event, plan, fleet)


def _may_ask_for_a_machine(label: str) -> bool:
    """Check that smoke.yml plans the label, which may still be a topic or a misspelled request."""
    return ":" in label or label.casefold().startswith(("smoke", "expectations", "bench"))


def _of_push(event: Event, plan: Plan, fleet: Fleet) -> Iterator[StartedJob]:
    if event.ref == f"refs/heads/{fleet.github.protected_ref}":
        yield from _of_ci(event, plan, fleet)


def _of_merge_group(event: Event, plan: Plan, fleet: Fleet) -> Iterator[StartedJob]:
    if event.action == "checks_requested":
        yield from _of_ci(event, plan, fleet)


def _of_ci(event: Event, plan: Plan, fleet: Fleet) -> Iterator[StartedJob]:
    hosted = (fleet.github.hosted,)
    yield _plan_job("ci.yml", event.sha, fleet)
    yield from _planned("ci.yml", plan, fleet)
    if plan.afterwards:
        yield StartedJob(
            workflow="ci.yml", job="smoke", labels=hosted, sha=event.sha, permissions=_READ
        )
    yield StartedJob(workflow="ci.yml", job="required", labels=hosted)


def _of_new_commit(event: Event, _: Plan, fleet: Fleet) -> Iterator[StartedJob]:
    """Remove the labels, in a job that checks nothing out."""
    if event.action == "synchronize":
        for _label in event.pull_request.get("labels") or ():
            yield StartedJob(
                workflow="labels.yml",
                job="withdraw",
                labels=(fleet.github.hosted,),
                permissions={"pull-requests": "write"},
            )


def _of_dispatch(event: Event, plan: Plan, fleet: Fleet) -> Iterator[StartedJob]:
    hosted = (fleet.github.hosted,)
    if event.workflow == "nightly.yml":
        yield from _of_night(event, plan, fleet)
    elif event.workflow == "reaper.yml":
        yield _reaper(event, fleet)
    elif event.workflow in ("bench.yml", "recapture.yml"):
        environment = event.workflow.removesuffix(".yml")
        yield StartedJob(
            workflow=event.workflow, job="approve", labels=hosted, environment=environment
        )
        yield _plan_job(event.workflow, event.sha, fleet)
        yield from _planned(event.workflow, plan, fleet)
        if event.workflow == "recapture.yml" and plan.machines:
            yield StartedJob(
                workflow=event.workflow,
                job="propose",
                labels=hosted,
                sha=event.sha,
                permissions={"contents": "write", "pull-requests": "write"},
            )


def _of_schedule(event: Event, plan: Plan, fleet: Fleet) -> Iterator[StartedJob]:
    if event.payload.get("schedule") == fleet.github.nightly:
        yield from _of_night(event, plan, fleet)
    elif event.payload.get("schedule") == fleet.github.reaper:
        yield _reaper(event, fleet)


def _of_night(event: Event, plan: Plan, fleet: Fleet) -> Iterator[StartedJob]:
    hosted = (fleet.github.hosted,)
    yield StartedJob(
        workflow="nightly.yml",
        job="plan",
        labels=hosted,
        sha=event.sha,
        permissions={"actions": "read", "contents": "read"},
    )
    yield from _planned("nightly.yml", plan, fleet)
    if event.ref == f"refs/heads/{fleet.github.protected_ref}":
        yield StartedJob(
            workflow="nightly.yml",
            job="report",
            labels=hosted,
            sha=event.sha,
            permissions={"contents": "read", "issues": "write"},
        )


def _reaper(event: Event, fleet: Fleet) -> StartedJob:
    return StartedJob(
        workflow="reaper.yml",
        job="reap",
        labels=(fleet.github.hosted,),
        sha=event.sha,
        permissions={"contents": "read", "id-token": "write"},
        environment="reaper",
    )


def _plan_job(workflow: str, sha: str, fleet: Fleet) -> StartedJob:
    labels = (fleet.github.hosted,)
    return StartedJob(
        workflow=workflow, job="plan / plan", labels=labels, sha=sha, permissions=_READ
    )


def _planned(workflow: str, plan: Plan, fleet: Fleet) -> Iterator[StartedJob]:
    for _ in plan.tiers:
        yield StartedJob(
            workflow=workflow,
            job="tests / session",
            labels=(fleet.github.hosted,),
            sha=plan.sha,
            permissions=_READ,
        )
    for machine in plan.machines:
        yield StartedJob(
            workflow=workflow,
            job="machines / run",
            group=fleet.github.runner_group,
            labels=(f"assay-{machine.target}",),
            sha=plan.sha,
            permissions=_READ,
            environment=f"assay-{machine.target}",
        )
        yield StartedJob(workflow=workflow, job="machines / ran", labels=(fleet.github.hosted,))


_RULES: dict[str, Callable[[Event, Plan, Fleet], Iterator[StartedJob]]] = {
    "pull_request": _of_pull_request,
    "pull_request_target": _of_new_commit,
    "push": _of_push,
    "merge_group": _of_merge_group,
    "workflow_dispatch": _of_dispatch,
    "schedule": _of_schedule,
}
