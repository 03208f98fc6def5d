"""All jobs that GitHub should start for an event: the planned ones and those around them.

`nox -s runners` compares them with the committed workflows, evaluated by GitHub's own parser.
"""

from collections.abc import Callable, Iterator

from assay_runners.planning import Event, Plan
from packages.runners.tests.fleet import GITHUB
from packages.runners.tests.trigger_rows import (
    BUILD,
    CONFLICTS,
    PROPOSE,
    PROTECTED,
    PUBLISH,
    REAP,
    REQUIRED,
    SITE,
    Row,
    approval,
    machine,
    night,
    planned,
    tests,
    training,
    withdrawn,
)


def started_jobs(event: Event, plan: Plan) -> list[Row]:
    """Return the jobs of `plan`, and those that plan, collect and report."""
    rule = _RULES.get(event.name)
    return list(rule(event, plan)) if rule else []


def _of_pull_request(event: Event, plan: Plan) -> Iterator[Row]:
    if event.action == "labeled" and _may_ask_for_a_machine(event.label):
        yield planned("smoke.yml", event.head_sha)
        yield from _jobs_of("smoke.yml", plan)
    elif event.action in ("opened", "synchronize", "reopened"):
        yield from _of_ci(event, plan)


def _may_ask_for_a_machine(label: str) -> bool:
    """Check that smoke.yml plans the label, which may still be a topic or a misspelled request."""
    return ":" in label or label.casefold().startswith(("smoke", "expectations", "bench"))


def _of_push(event: Event, plan: Plan) -> Iterator[Row]:
    if event.ref == PROTECTED:
        yield from (*_of_ci(event, plan), *SITE)
    elif event.ref.startswith("refs/tags/v"):
        yield from (BUILD, PUBLISH)


def _of_merge_group(event: Event, plan: Plan) -> Iterator[Row]:
    if event.action == "checks_requested":
        yield from _of_ci(event, plan)


def _of_ci(event: Event, plan: Plan) -> Iterator[Row]:
    yield planned("ci.yml", event.sha)
    yield from _jobs_of("ci.yml", plan)
    if plan.afterwards:
        yield training(event.sha)
    yield REQUIRED


def _of_pull_request_target(event: Event, _: Plan) -> Iterator[Row]:
    """Remove the labels, and say that GitHub starts nothing, in jobs that check nothing out."""
    if event.action == "synchronize":
        yield from withdrawn(len(event.pull_request.get("labels") or ()))
    if event.action in ("opened", "synchronize", "reopened") or ":" in event.label:
        yield CONFLICTS


def _of_dispatch(event: Event, plan: Plan) -> Iterator[Row]:
    if event.workflow == "nightly.yml":
        yield from night(len(plan.tiers), event.ref)
    elif event.workflow == "reaper.yml":
        yield from REAP
    elif event.workflow == "release.yml":
        yield BUILD
    elif event.workflow in ("bench.yml", "recapture.yml"):
        yield approval(event.workflow)
        yield planned(event.workflow, event.sha)
        yield from _jobs_of(event.workflow, plan)
        if event.workflow == "recapture.yml" and plan.machines:
            yield PROPOSE


def _of_schedule(event: Event, plan: Plan) -> Iterator[Row]:
    if event.payload.get("schedule") == GITHUB.nightly:
        yield from night(len(plan.tiers), event.ref)
    elif event.payload.get("schedule") == GITHUB.reaper:
        yield from REAP


def _jobs_of(workflow: str, plan: Plan) -> Iterator[Row]:
    yield from tests(workflow, plan.sha, len(plan.tiers))
    for job in plan.machines:
        yield from machine(workflow, f"assay-{job.target}", plan.sha)


_RULES: dict[str, Callable[[Event, Plan], Iterator[Row]]] = {
    "pull_request": _of_pull_request,
    "pull_request_target": _of_pull_request_target,
    "push": _of_push,
    "merge_group": _of_merge_group,
    "workflow_dispatch": _of_dispatch,
    "schedule": _of_schedule,
}
