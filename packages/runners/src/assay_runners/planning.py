"""The jobs that a GitHub event starts. Pure: no files, processes or network.

An event becomes a plan by the rule of its name (`make_plan`, at the end). Labels name machines and tiers.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import PurePosixPath
from typing import Any

from pydantic import BaseModel, ConfigDict

from assay.devices.run_string import find_vendor_name
from assay.foreign_text import markdown_block
from assay_runners.fleet import Fleet, Runner, Vendor

Payload = dict[str, Any]


class Event(BaseModel):
    """An event as a workflow run sees it."""

    model_config = ConfigDict(frozen=True)

    name: str
    """GITHUB_EVENT_NAME."""
    payload: Payload
    """The object in the file GITHUB_EVENT_PATH."""
    sha: str
    """GITHUB_SHA. For a pull request this is the merge commit that GitHub made, not the head."""
    ref: str = ""
    """GITHUB_REF."""
    changed: tuple[str, ...] | None = None
    """The files that differ from the base; None if unknown."""
    unchanged_since_success: bool = False
    """The last successful run of this workflow ran the same commit."""

    @property
    def action(self) -> str:
        """The activity of a pull request event: "labeled", "synchronize"; "" for other events."""
        return str(self.payload.get("action") or "")

    @property
    def workflow(self) -> str:
        """The file name of the workflow that a dispatch starts; "" for other events."""
        return str(self.payload.get("workflow") or "").rsplit("/", 1)[-1]

    @property
    def pull_request(self) -> Payload:
        """The pull request; empty for other events."""
        return self.payload.get("pull_request") or {}

    @property
    def head_sha(self) -> str:
        """The newest commit of the pull request when the event happened."""
        return str(self.pull_request.get("head", {}).get("sha", ""))

    @property
    def label(self) -> str:
        """The label that was just added to the pull request or removed from it."""
        return str((self.payload.get("label") or {}).get("name", ""))

    @property
    def is_from_fork(self) -> bool:
        """The pull request comes from another repository, which may be deleted."""
        head = self.pull_request.get("head", {}).get("repo") or {}
        base = self.pull_request.get("base", {}).get("repo") or {}
        return str(head.get("full_name")).casefold() != str(base.get("full_name")).casefold()

    @property
    def sender(self) -> Payload:
        """The account that caused the event."""
        return self.payload.get("sender") or {}

    @property
    def inputs(self) -> dict[str, str]:
        """The inputs of a dispatch that are not blank."""
        given = self.payload.get("inputs") or {}
        return {name: str(value) for name, value in given.items() if str(value or "").strip()}


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class TierJob(_Part):
    """A session without an accelerator, on a GitHub-hosted machine."""

    session: str
    python: str


class SessionCall(_Part):
    """`nox -s SESSION -- ARGUMENTS`."""

    session: str
    arguments: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """The arguments of nox."""
        return ["-s", self.session, *(["--", *self.arguments] if self.arguments else [])]

    def __str__(self) -> str:
        return shlex.join(["nox", *self.words])


class MachineJob(_Part):
    """A job for one machine with accelerators."""

    target: str
    """The machine, as a label names it: "nvidia-4"."""
    tier: str
    """The purpose: "smoke", "expectations", "bench"."""
    cards: int
    """The number of devices that the machine must have."""
    calls: tuple[SessionCall, ...]
    """The sessions, in the order in which they run."""
    timeout_minutes: int
    variables: dict[str, str] = {}
    why: str
    """The request that led to the job."""


class Refusal(_Part):
    """A request that will not run."""

    asked: str
    """The request, in the words of its author."""
    why: str
    """The reason in one sentence, with the request to make instead."""


class Plan(_Part):
    """The jobs that an event starts."""

    event: str
    sha: str
    """The commit that the jobs check out."""
    tiers: tuple[TierJob, ...] = ()
    afterwards: tuple[SessionCall, ...] = ()
    """An abbreviated training, which a GitHub-hosted machine runs once all tiers are green."""
    machines: tuple[MachineJob, ...] = ()
    refused: tuple[Refusal, ...] = ()
    nothing: str = ""
    """Why no job was chosen; "" if there are jobs."""


def explain_plan(plan: Plan) -> str:
    """List every job and every refusal with its reason, or say why nothing runs."""
    lines = [f"{plan.event}, commit {plan.sha or 'not known'}"]
    if plan.tiers:
        pythons: dict[str, list[str]] = {}
        for job in plan.tiers:
            pythons.setdefault(job.session, []).append(job.python)
        for alike, sessions in groupby(pythons, lambda session: pythons[session]):
            lines.append(
                f"  without an accelerator, Python {', '.join(alike)}: {', '.join(sessions)}"
            )
    if plan.afterwards:
        lines.append("  then, on the CPU")
        lines += [f"    {call}" for call in plan.afterwards]
    for machine in plan.machines:
        lines.append(f"  {machine.tier} on assay-{machine.target}, asked for by {machine.why}")
        lines += [f"    {call}" for call in machine.calls]
    lines += [f"  refused: {refusal.asked}: {refusal.why}" for refusal in plan.refused]
    if plan.nothing:
        lines.append(f"  {plan.nothing}")
    return "\n".join(lines)


def summarize_plan(plan: Plan) -> str:
    """Write the same as Markdown. Labels and inputs are foreign text, so they stand in code blocks only."""
    blocks = [f"### {_heading(plan)}", markdown_block(explain_plan(plan))]
    return "\n\n".join(blocks) + "\n"


def _heading(plan: Plan) -> str:
    if plan.refused:
        return "Refused"
    if plan.nothing:
        return "Nothing to do"
    num_jobs = len(plan.tiers) + bool(plan.afterwards) + len(plan.machines)
    return f"{num_jobs} job{'s' if num_jobs > 1 else ''}"


# The sessions of a tier. A machine runs those that its entry lists.
TIER_SESSIONS = {
    "smoke": ("check", "smoke", "expectations"),
    "expectations": ("expectations",),
    "bench": ("bench",),
}
# The tiers that a label may request; benchmarks are started by hand.
LABELED_TIERS = ("smoke", "expectations")
EVERY = "all"
# "smoke-nvidia" is a misspelled request; "smoke" and "smoke tests" are topics of a pull request.
_WITHOUT_COLON = re.compile(r"(?P<tier>smoke|expectations|bench)[\W_]+(?P<target>.+)")

_NAME_AND_CARDS = r"(?P<name>.+?)(?:-(?P<cards>\d+))?"
_BENCH_BY_HAND = "benchmarks take hours: start the workflow `bench` by hand, for a branch"


def read_label(label: str, fleet: Fleet) -> tuple[str, list[Runner]] | Refusal | None:
    """Read the tier and the machines that `label` requests.

    Case is ignored, as GitHub does.
    Returns: a refusal if the label is a request for a machine that does not exist or does not run the
        tier; None if it is not a request.
    """
    tier, colon, target = label.casefold().partition(":")
    if not colon:
        return _refuse_without_colon(label, fleet)
    if tier not in TIER_SESSIONS:
        return _refuse_tier(label, tier, target, fleet)
    if tier not in LABELED_TIERS:
        return Refusal(asked=label, why=_BENCH_BY_HAND)
    runners = find_able_runners(target, tier, fleet)
    if not runners:
        return Refusal(asked=label, why=describe_no_runner(target, tier, fleet, f"{tier}:"))
    return tier, runners


def find_runners(target: str, fleet: Fleet) -> list[Runner]:
    """Find the machines that `target` names. "all" names each vendor's machines with the fewest cards."""
    if target == EVERY:
        return [Runner(vendor=vendor, kind=vendor.runners[0]) for vendor in fleet.vendors]
    runner = fleet.find(target)
    return [runner] if runner else []


def find_able_runners(target: str, tier: str, fleet: Fleet) -> list[Runner]:
    """Find the machines that `target` names and that run a session of the tier."""
    return [runner for runner in find_runners(target, fleet) if sessions_of(tier, runner)]


def describe_no_runner(target: str, tier: str, fleet: Fleet, prefix: str = "") -> str:
    """Say why `find_able_runners` finds nothing."""
    if find_runners(target, fleet):
        return f"the machines of {target} run no session of {tier}"
    nearest = _nearest_target(target.strip(), fleet)
    if nearest:
        return f"there is no machine {target!r}; nearest is {prefix}{nearest}"
    known = [*(runner.target for runner in fleet.runners()), EVERY]
    return f"there is no machine {target!r}; there are {', '.join(known)}"


def list_labels(fleet: Fleet) -> list[str]:
    """List the labels that request a machine."""
    return [
        f"{tier}:{target}"
        for tier in LABELED_TIERS
        for target in (*(one.target for one in fleet.runners() if sessions_of(tier, one)), EVERY)
    ]


def sessions_of(tier: str, runner: Runner) -> tuple[str, ...]:
    """List the sessions of the tier that such a machine runs."""
    return tuple(name for name in TIER_SESSIONS[tier] if name in runner.kind.sessions)


def _refuse_without_colon(label: str, fleet: Fleet) -> Refusal | None:
    words = _WITHOUT_COLON.fullmatch(label.casefold())
    named = words and re.fullmatch(_NAME_AND_CARDS, words["target"])
    if not words or not named or not _find_vendor(named["name"], fleet):
        return None
    if words["tier"] not in LABELED_TIERS:
        return Refusal(asked=label, why=_BENCH_BY_HAND)
    target = _nearest_target(words["target"], fleet)
    why = f"a machine is asked for with a colon: {words['tier']}:{target}"
    return Refusal(asked=label, why=why)


def _refuse_tier(label: str, tier: str, target: str, fleet: Fleet) -> Refusal | None:
    """Refuse a label with an unknown tier, or with a session for its tier ("check:nvidia").

    Returns: None for a topic, such as "area:nvidia".
    """
    nearest = get_close_matches(tier, TIER_SESSIONS, n=1, cutoff=0.75)
    sessions = {name for runner in fleet.runners() for name in runner.kind.sessions}
    if nearest:
        meant = target if target == EVERY else _nearest_target(target, fleet) or target
        why = f"there is no tier {tier!r}; nearest is {nearest[0]}:{meant}"
    elif tier in sessions and find_runners(target, fleet):
        labels = " and ".join(f"{known}:{target}" for known in LABELED_TIERS)
        why = f"there is no tier {tier!r}; there are {labels}"
    else:
        return None
    return Refusal(asked=label, why=why)


def _nearest_target(target: str, fleet: Fleet) -> str:
    """Find the nearest target by vendor and number of cards, else by spelling; "" if there is none."""
    named = re.fullmatch(_NAME_AND_CARDS, target)
    if named and (vendor := _find_vendor(named["name"], fleet)):
        cards = int(named["cards"] or 1)
        kind = min(vendor.runners, key=lambda kind: abs(kind.cards - cards))
        return Runner(vendor=vendor, kind=kind).target
    known = [*(runner.target for runner in fleet.runners()), EVERY]
    return next(iter(get_close_matches(target, known, n=1, cutoff=0.6)), "")


def _find_vendor(name: str, fleet: Fleet) -> Vendor | None:
    known = find_vendor_name(name)
    return next((vendor for vendor in fleet.vendors if vendor.name == known), None)


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


RELEASE, RELEASE_TAGS = "release.yml", "v*"

_REAPS_ITSELF = "the reaper has no sessions"
_RELEASES_ITSELF = f"{RELEASE} has its own jobs"
_DOCUMENTATION = "nothing to do: only documentation changed"

# A rule returns a plan, the refusal of the only request, or why nothing runs.
_Rule = Callable[[Event, Fleet], Plan | Refusal | str]


def make_plan(event: Event, fleet: Fleet) -> Plan:
    """Plan the jobs that `event` starts on the machines of `fleet`."""
    rule = RULES.get(event.name)
    found = rule(event, fleet) if rule else f"no workflow waits for {event.name}"
    if isinstance(found, Plan):
        return found
    if isinstance(found, Refusal):
        return Plan(event=event.name, sha=event.sha, refused=(found,))
    return Plan(event=event.name, sha=event.sha, nothing=found)


def _plan_pull_request(event: Event, fleet: Fleet) -> Plan | Refusal | str:
    """Plan the first tiers for a new commit, machines for a label, and nothing otherwise."""
    if event.action == "labeled":
        return _plan_label(event, fleet)
    if event.action not in ("opened", "synchronize", "reopened"):
        return f"no workflow waits for a pull request that is {event.action}"
    if only_documentation(event.changed):
        return _DOCUMENTATION
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


def _plan_label(event: Event, fleet: Fleet) -> Plan | Refusal | str:
    asked = read_label(event.label, fleet)
    if asked is None:
        return f"the label {event.label!r} asks for no machine"
    if isinstance(asked, Refusal):
        return asked
    tier, runners = asked
    if why := _keep_from_machines(event):
        return Refusal(asked=event.label, why=why)
    if only_documentation(event.changed):
        return _DOCUMENTATION
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


def _plan_push(event: Event, fleet: Fleet) -> Plan | Refusal | str:
    if fnmatchcase(event.ref, f"refs/tags/{RELEASE_TAGS}"):
        return _RELEASES_ITSELF
    if event.ref != f"refs/heads/{fleet.github.protected_ref}":
        return f"no workflow waits for a push to {event.ref}"
    return _plan_first_tiers(event, fleet)


def _plan_merge_group(event: Event, fleet: Fleet) -> Plan | Refusal | str:
    if event.action != "checks_requested":
        return f"no workflow waits for a merge group that is {event.action}"
    return _plan_first_tiers(event, fleet)


def _plan_dispatch(event: Event, fleet: Fleet) -> Plan | Refusal | str:
    rule = _BY_HAND.get(event.workflow)
    if rule is None:
        return f"{event.workflow or 'no workflow'} cannot be started by hand"
    return rule if isinstance(rule, str) else rule(event, fleet)


def _plan_schedule(event: Event, fleet: Fleet) -> Plan | Refusal | str:
    cron = event.payload.get("schedule")
    if cron == fleet.github.nightly:
        return _plan_night(event, fleet)
    return _REAPS_ITSELF if cron == fleet.github.reaper else f"no workflow waits for {cron!r}"


def _plan_night(event: Event, fleet: Fleet) -> Plan | Refusal | str:
    if event.name == "schedule" and event.unchanged_since_success:
        return "nothing changed since the last nightly run that succeeded"
    tiers = tier_jobs(NIGHTLY, fleet.github.pythons[:1])
    bench = tier_jobs(("bench",), (fleet.github.bench_python,))
    return Plan(event=event.name, sha=event.sha, tiers=(*tiers, *bench))


def _plan_bench(event: Event, fleet: Fleet) -> Plan | Refusal | str:
    target = event.inputs.get("vendor", "").casefold()
    if target == EVERY:
        why = "benchmarks take hours: name one machine"
        return Refusal(asked=target, why=why)
    if refusal := _refuse_target(target, "bench", fleet) or _refuse_options(event.inputs):
        return refusal
    if "model" not in event.inputs:
        why = (
            f"name a model: the shipped baselines are of Python {fleet.github.bench_python}, and"
            " machines have their vendor's"
        )
        return Refusal(asked="bench", why=why)
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


def _plan_recapture(event: Event, fleet: Fleet) -> Plan | Refusal | str:
    """Plan the capture of the models' expectations on each machine."""
    protected = f"refs/heads/{fleet.github.protected_ref}"
    if event.ref != protected:
        why = f"its pull request would bring along what {event.ref} has: start it from {protected}"
        return Refusal(asked="recapture", why=why)
    models, targets = (
        event.inputs.get(name, "").replace(",", " ").split() for name in ("models", "vendors")
    )
    reason = event.inputs.get("reason", "")
    if not models or not targets or not reason:
        why = "a recapture needs models, vendors and a reason"
        return Refusal(asked="recapture", why=why)
    named = {**{f"the model {model}": model for model in models}, "the reason": reason}
    refusals = [_refuse_options(named)]
    refusals += [_refuse_target(target.casefold(), "expectations", fleet) for target in targets]
    if any(refusals):
        return Plan(event=event.name, sha=event.sha, refused=tuple(filter(None, refusals)))
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
_BY_HAND: dict[str, _Rule | str] = {
    "bench.yml": _plan_bench,
    "recapture.yml": _plan_recapture,
    "nightly.yml": _plan_night,
    "reaper.yml": _REAPS_ITSELF,
    RELEASE: _RELEASES_ITSELF,
}
