"""The rule of each event: which jobs it starts."""

from collections.abc import Callable

from assay_runners.fleet.entries import Fleet
from assay_runners.planning.choices import NIGHTLY, plan_nothing, tier_jobs
from assay_runners.planning.dispatches import plan_bench, plan_reaper, plan_recapture
from assay_runners.planning.events import Event
from assay_runners.planning.plan import Plan
from assay_runners.planning.pull_requests import plan_first_tiers, plan_pull_request

_Rule = Callable[[Event, Fleet], Plan]


def make_plan(event: Event, fleet: Fleet) -> Plan:
    """Plan the jobs that `event` starts on the machines of `fleet`."""
    rule = RULES.get(event.name)
    if rule is None:
        return plan_nothing(event, f"no workflow waits for {event.name}")
    return rule(event, fleet)


def _plan_push(event: Event, fleet: Fleet) -> Plan:
    if event.ref != f"refs/heads/{fleet.github.protected_ref}":
        return plan_nothing(event, f"no workflow waits for a push to {event.ref}")
    return plan_first_tiers(event, fleet)


def _plan_merge_group(event: Event, fleet: Fleet) -> Plan:
    if event.action != "checks_requested":
        return plan_nothing(event, f"no workflow waits for a merge group that is {event.action}")
    return plan_first_tiers(event, fleet)


def _plan_dispatch(event: Event, fleet: Fleet) -> Plan:
    rule = _BY_HAND.get(event.workflow)
    if rule is None:
        return plan_nothing(event, f"{event.workflow or 'no workflow'} cannot be started by hand")
    return rule(event, fleet)


def _plan_schedule(event: Event, fleet: Fleet) -> Plan:
    cron = event.payload.get("schedule")
    rule = {fleet.github.nightly: _plan_night, fleet.github.reaper: plan_reaper}.get(str(cron))
    return rule(event, fleet) if rule else plan_nothing(event, f"no workflow waits for {cron!r}")


def _plan_night(event: Event, fleet: Fleet) -> Plan:
    if event.name == "schedule" and event.unchanged_since_success:
        return plan_nothing(event, "nothing changed since the last nightly run that succeeded")
    tiers = tier_jobs(NIGHTLY, fleet.github.pythons[:1])
    bench = tier_jobs(("bench",), (fleet.github.bench_python,))
    return Plan(event=event.name, sha=event.sha, tiers=(*tiers, *bench))


RULES: dict[str, _Rule] = {
    "pull_request": plan_pull_request,
    "push": _plan_push,
    "merge_group": _plan_merge_group,
    "workflow_dispatch": _plan_dispatch,
    "schedule": _plan_schedule,
}
_BY_HAND: dict[str, _Rule] = {
    "bench.yml": plan_bench,
    "recapture.yml": plan_recapture,
    "nightly.yml": _plan_night,
    "reaper.yml": plan_reaper,
}
