"""The sessions that events start, and the jobs of a plan."""

from collections.abc import Iterable, Sequence

from assay_runners.fleet.entries import Runner
from assay_runners.planning.events import Event
from assay_runners.planning.labels import sessions_of
from assay_runners.planning.plan import MachineJob, Plan, Refusal, SessionCall, TierJob

# Every pull request runs these first, each in a job of its own. `nox` alone leaves out subsystem-long.
FIRST_TIERS = ("lint", "types", "unit", "subsystem", "subsystem-long", "runners", "repo")
# Run after them on the same commit. The job `smoke` of ci.yml has the same lines.
ON_THE_CPU = (
    SessionCall(session="smoke", arguments=("--coverage", "one")),
    SessionCall(session="expectations"),
    SessionCall(session="check"),
)
# Must pass before a job on a machine with accelerators starts.
BEFORE_MACHINES = ("lint", "types", "unit")
# Too slow for every pull request. The nightly run adds bench, which needs one exact Python.
NIGHTLY = ("faults", "false-alarms", "fuzz", "perf", "bench-rates", "smoke-faults", "suites")


def tier_jobs(sessions: Iterable[str], pythons: Sequence[str]) -> tuple[TierJob, ...]:
    """Make a job for each session on each version of Python."""
    return tuple(
        TierJob(session=session, python=python) for session in sessions for python in pythons
    )


def machine_job(runner: Runner, tier: str, calls: Sequence[SessionCall], why: str) -> MachineJob:
    """Make a job for one of the machines that `runner` describes."""
    return MachineJob(
        target=runner.target,
        tier=tier,
        cards=runner.kind.cards,
        calls=tuple(calls),
        timeout_minutes=runner.kind.timeout_minutes,
        variables=runner.vendor.variables,
        why=why,
    )


def choose_calls(tier: str, runner: Runner) -> list[SessionCall]:
    """Choose the sessions of the tier that such a machine runs, as large as its entry allows."""
    cards = ("--cards", str(runner.kind.cards)) if runner.kind.cards else ()
    arguments_of = {"smoke": ("--budget", f"{runner.kind.budget_minutes}m", *cards)}
    return [
        SessionCall(session=session, arguments=arguments_of.get(session, ()))
        for session in sessions_of(tier, runner)
    ]


def plan_nothing(event: Event, why: str) -> Plan:
    """Make a plan without jobs."""
    return Plan(event=event.name, sha=event.sha, nothing=why)


def plan_refusal(event: Event, *refusals: Refusal) -> Plan:
    """Make a plan without jobs for a refused request."""
    return Plan(event=event.name, sha=event.sha, refused=refusals)
