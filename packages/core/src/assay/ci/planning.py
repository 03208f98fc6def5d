"""The jobs of a repository that an event of GitHub starts."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from assay.ci.configuration import TIERS, Configuration, Step, list_steps
from assay.errors import assay_command, suggest
from assay.files import read_json_object
from assay.foreign_text import one_line


@dataclass(frozen=True)
class Job:
    """A job on one machine."""

    target: str
    """The machine's name in `assay.toml`."""
    tier: str
    """The one tier to run; "" for those of the machine."""
    runs_on: tuple[str, ...]
    minutes: int
    pip_index: str


@dataclass(frozen=True)
class Plan:
    """The jobs that an event starts, or the reason why it starts none."""

    event: str
    """The event in words: "label assay:nvidia"."""
    jobs: tuple[Job, ...] = ()
    nothing: str = ""
    """The reason why the event starts nothing; "" for none."""
    refused: str = ""
    """The error in the request; "" in a valid one."""
    without_runner: str = ""
    """MACHINE or MACHINE/TIER of the event, if no runner of GitHub is that machine."""

    def steps(self, configuration: Configuration) -> list[Step]:
        """Return the commands of all jobs, or those of the machine without a runner."""
        name, _, tier = self.without_runner.partition("/")
        targets = [(job.target, job.tier) for job in self.jobs]
        targets += [(name, tier)] if name else []
        return [step for target in targets for step in list_steps(configuration, *target)]

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON."""
        return {"schema": 1, **asdict(self)}


def plan_label(configuration: Configuration, label: str) -> Plan:
    """Plan the jobs that a label starts: PREFIX:MACHINE, or PREFIX:MACHINE/TIER.

    Case is ignored, as GitHub does. A label with another prefix asks for nothing.
    """
    event = f"label {one_line(label)}"
    prefix, colon, target = label.strip().casefold().partition(":")
    name, slash, tier = target.partition("/")
    if prefix != configuration.label or not colon:
        why = f"the labels that start a job begin with {configuration.label}:"
        is_typo = get_close_matches(prefix, [configuration.label, *TIERS], n=1, cutoff=0.75)
        if is_typo and name in configuration.machines:
            return Plan(event, refused=f"{why} did you mean {configuration.label}:{target}?")
        return Plan(event, nothing=why)
    refused = ""
    if name not in configuration.machines:
        refused = suggest("machine", name, configuration.machines)
    elif slash and tier not in TIERS:
        refused = suggest("tier", tier, TIERS)
    elif not list_steps(configuration, name, tier):
        refused = f"assay.toml has no entries for {target} to run"
    if refused:
        return Plan(event, refused=refused)
    if not configuration.machines[name].runs_on:
        command = assay_command("ci", "run", name, tier=tier or None)
        why = (
            f"machines.{name} has no runs-on, the labels of its runner; on that machine: {command}"
        )
        return Plan(event, refused=why, without_runner=target)
    return Plan(event, (_make_job(configuration, name, tier),))


def plan_commit(configuration: Configuration, event: str) -> Plan:
    """Plan the jobs that every commit starts."""
    jobs = tuple(
        _make_job(configuration, name)
        for name, machine in configuration.machines.items()
        if machine.start == "commit" and list_steps(configuration, name)
    )
    return Plan(event, jobs, "" if jobs else 'no machine has start = "commit"')


def plan_all(configuration: Configuration) -> list[Plan]:
    """Plan a commit, and all that a machine runs: its own tiers, and each other tier with entries."""
    plans = []
    for name, machine in configuration.machines.items():
        others = [tier for tier in TIERS if tier not in machine.tiers]
        for tier in ["", *(tier for tier in others if list_steps(configuration, name, tier))]:
            target = f"{name}/{tier}" if tier else name
            if machine.runs_on:
                plans.append(plan_label(configuration, f"{configuration.label}:{target}"))
            else:
                command = assay_command("ci", "run", name, tier=tier or None)
                plans.append(Plan(command, without_runner=target))
    if any(machine.runs_on for machine in configuration.machines.values()):
        plans.append(plan_commit(configuration, "every commit"))
    return plans


def plan_run(configuration: Configuration, variables: Mapping[str, str]) -> Plan:
    """Plan the jobs of the workflow run that GitHub describes in `variables`."""
    payload = read_json_object(Path(variables["GITHUB_EVENT_PATH"]))
    given = payload.get("label" if payload.get("action") == "labeled" else "inputs")
    label = given.get("name") or given.get("label") if isinstance(given, dict) else None
    if label:
        return plan_label(configuration, str(label))
    return plan_commit(configuration, one_line(variables.get("GITHUB_EVENT_NAME", "commit")))


def describe_plan(configuration: Configuration, plan: Plan) -> str:
    """List each job with its machine and commands, or the reason that no job starts."""
    lines = [plan.event]
    lines += [f"  refused: {plan.refused}"] if plan.refused else []
    lines += [f"  nothing to do: {plan.nothing}"] if plan.nothing else []
    for job in plan.jobs:
        lines.append(f"  {job.target}: a job on a runner with {', '.join(job.runs_on)}")
        steps = list_steps(configuration, job.target, job.tier)
        lines += [f"    {step.tier}: {step.command}" for step in steps]
    if plan.without_runner:
        lines += [f"    {step.tier}: {step.command}" for step in plan.steps(configuration)]
    return "\n".join(lines)


def publish_jobs(plan: Plan, variables: Mapping[str, str]) -> None:
    """Set the output `jobs` of a workflow's step, a JSON list. Outside a workflow run, do nothing."""
    write_outputs({"jobs": json.dumps([asdict(job) for job in plan.jobs])}, variables)


def write_outputs(values: Mapping[str, str], variables: Mapping[str, str]) -> None:
    """Set the step's outputs, one line each. Outside a workflow run, do nothing."""
    path = variables.get("GITHUB_OUTPUT")
    if not path:
        return
    lines = []
    for name, value in values.items():
        if "\n" in value or "\r" in value:
            raise ValueError(f"the output {name} has several lines")
        lines.append(f"{name}={value}\n")
    with Path(path).open("a", encoding="utf-8") as file:
        file.writelines(lines)


def _make_job(configuration: Configuration, name: str, tier: str = "") -> Job:
    machine = configuration.machines[name]
    return Job(name, tier, machine.runs_on, machine.minutes, machine.pip_index)
