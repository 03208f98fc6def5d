"""The rule of each event: which jobs it starts."""

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from assay_runners.fleet.entries import Fleet, Runner
from assay_runners.planning.events import Event
from assay_runners.planning.labels import (
    EVERY,
    describe_no_runner,
    find_able_runners,
    read_label,
    sessions_of,
)
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


RELEASE, RELEASE_TAGS = "release.yml", "v*"

_DOCUMENTATION = "nothing to do: only documentation changed"

_Rule = Callable[[Event, Fleet], Plan]


def make_plan(event: Event, fleet: Fleet) -> Plan:
    """Plan the jobs that `event` starts on the machines of `fleet`."""
    rule = RULES.get(event.name)
    if rule is None:
        return plan_nothing(event, f"no workflow waits for {event.name}")
    return rule(event, fleet)


def _plan_pull_request(event: Event, fleet: Fleet) -> Plan:
    """Plan the first tiers for a new commit, machines for a label, and nothing otherwise."""
    if event.action == "labeled":
        return _plan_label(event, fleet)
    if event.action not in ("opened", "synchronize", "reopened"):
        return plan_nothing(event, f"no workflow waits for a pull request that is {event.action}")
    if only_documentation(event.changed):
        return plan_nothing(event, _DOCUMENTATION)
    return _plan_first_tiers(event, fleet)


def _plan_first_tiers(event: Event, fleet: Fleet) -> Plan:
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
        return plan_nothing(event, _DOCUMENTATION)
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


def _plan_push(event: Event, fleet: Fleet) -> Plan:
    if fnmatchcase(event.ref, f"refs/tags/{RELEASE_TAGS}"):
        return _plan_release(event, fleet)
    if event.ref != f"refs/heads/{fleet.github.protected_ref}":
        return plan_nothing(event, f"no workflow waits for a push to {event.ref}")
    return _plan_first_tiers(event, fleet)


def _plan_merge_group(event: Event, fleet: Fleet) -> Plan:
    if event.action != "checks_requested":
        return plan_nothing(event, f"no workflow waits for a merge group that is {event.action}")
    return _plan_first_tiers(event, fleet)


def _plan_dispatch(event: Event, fleet: Fleet) -> Plan:
    rule = _BY_HAND.get(event.workflow)
    if rule is None:
        return plan_nothing(event, f"{event.workflow or 'no workflow'} cannot be started by hand")
    return rule(event, fleet)


def _plan_schedule(event: Event, fleet: Fleet) -> Plan:
    cron = event.payload.get("schedule")
    rule = {fleet.github.nightly: _plan_night, fleet.github.reaper: _plan_reaper}.get(str(cron))
    return rule(event, fleet) if rule else plan_nothing(event, f"no workflow waits for {cron!r}")


def _plan_night(event: Event, fleet: Fleet) -> Plan:
    if event.name == "schedule" and event.unchanged_since_success:
        return plan_nothing(event, "nothing changed since the last nightly run that succeeded")
    tiers = tier_jobs(NIGHTLY, fleet.github.pythons[:1])
    bench = tier_jobs(("bench",), (fleet.github.bench_python,))
    return Plan(event=event.name, sha=event.sha, tiers=(*tiers, *bench))


def _plan_bench(event: Event, fleet: Fleet) -> Plan:
    """Plan the bench session on one machine."""
    target = event.inputs.get("vendor", "").casefold()
    if target == EVERY:
        why = "benchmarks take hours: name one machine"
        return plan_refusal(event, Refusal(asked=target, why=why))
    if refusal := _refuse_target(target, "bench", fleet) or _refuse_options(event.inputs):
        return plan_refusal(event, refusal)
    if "model" not in event.inputs:
        why = (
            f"name a model: the shipped baselines are of Python {fleet.github.bench_python}, and"
            " machines have their vendor's"
        )
        return plan_refusal(event, Refusal(asked="bench", why=why))
    (runner,) = find_able_runners(target, "bench", fleet)
    job = machine_job(runner, "bench", _bench_calls(event.inputs), "a dispatch of bench")
    return Plan(event=event.name, sha=event.sha, machines=(job,))


def _bench_calls(inputs: dict[str, str]) -> list[SessionCall]:
    """Evaluate the model and compare it with the baseline, if one is named."""
    suite = ("--suite", inputs["suite"]) if "suite" in inputs else ()
    results = "runs/bench"
    asked = ("run", "--model", inputs["model"], *suite, "--output", results)
    calls = [SessionCall(session="bench", arguments=asked)]
    if "baseline" in inputs:
        compared = ("compare", inputs["baseline"], results, *suite, "--output", "runs/compared")
        calls.append(SessionCall(session="bench", arguments=compared))
    return calls


def _plan_recapture(event: Event, fleet: Fleet) -> Plan:
    """Plan the capture of the models' expectations on each machine."""
    protected = f"refs/heads/{fleet.github.protected_ref}"
    if event.ref != protected:
        why = f"its pull request would bring along what {event.ref} has: start it from {protected}"
        return plan_refusal(event, Refusal(asked="recapture", why=why))
    models, targets = (
        event.inputs.get(name, "").replace(",", " ").split() for name in ("models", "vendors")
    )
    reason = event.inputs.get("reason", "")
    if not models or not targets or not reason:
        why = "a recapture needs models, vendors and a reason"
        return plan_refusal(event, Refusal(asked="recapture", why=why))
    named = {**{f"the model {model}": model for model in models}, "the reason": reason}
    refusals = [_refuse_options(named)]
    refusals += [_refuse_target(target.casefold(), "expectations", fleet) for target in targets]
    if any(refusals):
        return plan_refusal(event, *filter(None, refusals))
    chosen = {
        runner.target: runner
        for target in targets
        for runner in find_able_runners(target.casefold(), "expectations", fleet)
    }
    approved_by = str(event.sender.get("login", ""))
    words = (*models, "--reason", reason, "--approved-by", approved_by)
    call = SessionCall(session="recapture", arguments=words)
    return Plan(
        event=event.name,
        sha=event.sha,
        machines=tuple(
            machine_job(runner, "expectations", [call], "a dispatch of recapture")
            for runner in chosen.values()
        ),
    )


def _plan_reaper(event: Event, _: Fleet) -> Plan:
    """Plan nothing: the reaper needs no machine."""
    return plan_nothing(event, "the reaper has no sessions")


def _plan_release(event: Event, _: Fleet) -> Plan:
    """Plan nothing: release.yml builds, tries and publishes in jobs of its own."""
    return plan_nothing(event, f"{RELEASE} has its own jobs")


def _refuse_target(target: str, tier: str, fleet: Fleet) -> Refusal | None:
    if find_able_runners(target, tier, fleet):
        return None
    return Refusal(asked=target, why=describe_no_runner(target, tier, fleet))


def _refuse_options(inputs: dict[str, str]) -> Refusal | None:
    """Refuse an input that a command would read as an option."""
    for name, value in inputs.items():
        if value.startswith("-"):
            return Refusal(asked=value, why=f"{name} begins with a dash, as only options do")
    return None


RULES: dict[str, _Rule] = {
    "pull_request": _plan_pull_request,
    "push": _plan_push,
    "merge_group": _plan_merge_group,
    "workflow_dispatch": _plan_dispatch,
    "schedule": _plan_schedule,
}
_BY_HAND: dict[str, _Rule] = {
    "bench.yml": _plan_bench,
    "recapture.yml": _plan_recapture,
    "nightly.yml": _plan_night,
    "reaper.yml": _plan_reaper,
    RELEASE: _plan_release,
}
