"""The plan of an event: the jobs that it starts, the refused requests, or why nothing runs."""

import shlex
from itertools import groupby

from pydantic import BaseModel, ConfigDict

from assay.foreign_text import markdown_block


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
    """How many devices the machine must have."""
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
