"""A plan in words: for a terminal, and for the summary of a job."""

import shlex
from itertools import groupby

from assay.foreign_text import markdown_block
from assay_runners.planning.plan import Plan, SessionCall


def explain_plan(plan: Plan) -> str:
    """Every job with why it was chosen, everything refused with why, or why nothing runs."""
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
        lines += [f"    {nox_command(call)}" for call in plan.afterwards]
    for machine in plan.machines:
        lines.append(f"  {machine.tier} on assay-{machine.target}, asked for by {machine.why}")
        lines += [f"    {nox_command(call)}" for call in machine.calls]
    lines += [f"  refused: {refusal.asked}: {refusal.why}" for refusal in plan.refused]
    if plan.nothing:
        lines.append(f"  {plan.nothing}")
    return "\n".join(lines)


def summarise_plan(plan: Plan) -> str:
    """The same as Markdown. Labels and inputs are others' words: they stand in code only."""
    blocks = [f"### {_heading(plan)}", markdown_block(explain_plan(plan))]
    return "\n\n".join(blocks) + "\n"


def nox_command(call: SessionCall) -> str:
    """The line that a person would type for the same."""
    words = ["--", *call.arguments] if call.arguments else []
    return shlex.join(["nox", "-s", call.session, *words])


def _heading(plan: Plan) -> str:
    if plan.refused:
        return "Refused"
    if plan.nothing:
        return "Nothing to do"
    num_jobs = len(plan.tiers) + bool(plan.afterwards) + len(plan.machines)
    return f"{num_jobs} job{'s' if num_jobs > 1 else ''}"
