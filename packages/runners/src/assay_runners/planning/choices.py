"""The sessions that events start, and the jobs of a plan that they become."""

from collections.abc import Iterable, Sequence

from assay_runners.fleet.entries import Runner
from assay_runners.planning.events import Event
from assay_runners.planning.labels import sessions_of
from assay_runners.planning.plan import MachineJob, Plan, Refusal, SessionCall, TierJob

# The first tiers, which every pull request runs: what `nox` runs where no session is named.
FIRST_TIERS = ("lint", "types", "unit", "subsystem", "runners", "repo")
# What follows them on the same commit; the job `smoke` of ci.yml has these lines.
ON_THE_CPU = (
    SessionCall(session="smoke", arguments=("--coverage", "one")),
    SessionCall(session="expectations"),
    SessionCall(session="check"),
)
# What comes before a machine with accelerators; the other sessions run beside it.
BEFORE_MACHINES = ("lint", "types", "unit")
# What takes too long for every pull request, beside bench, which needs a Python of its own.
NIGHTLY = ("faults", "false-alarms", "fuzz", "perf", "bench-rates", "smoke-faults", "suites")


def tier_jobs(sessions: Iterable[str], pythons: Sequence[str]) -> tuple[TierJob, ...]:
    """Each session on each version of Python."""
    return tuple(
        TierJob(session=session, python=python) for session in sessions for python in pythons
    )


def machine_job(runner: Runner, tier: str, calls: Sequence[SessionCall], why: str) -> MachineJob:
    """A job for one of the machines that `runner` describes."""
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
    """The sessions of the tier that such a machine runs, as large as its entry allows."""
    cards = ("--cards", str(runner.kind.cards)) if runner.kind.cards else ()
    arguments_of = {"smoke": ("--budget", f"{runner.kind.budget_minutes}m", *cards)}
    return [
        SessionCall(session=session, arguments=arguments_of.get(session, ()))
        for session in sessions_of(tier, runner)
    ]


def plan_nothing(event: Event, why: str) -> Plan:
    """A plan without jobs."""
    return Plan(event=event.name, sha=event.sha, nothing=why)


def plan_refusal(event: Event, *refusals: Refusal) -> Plan:
    """A plan without jobs, for something that was asked for."""
    return Plan(event=event.name, sha=event.sha, refused=refusals)
