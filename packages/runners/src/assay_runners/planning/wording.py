"""The text of a plan, for a terminal and for the summary of a job."""

from itertools import groupby

from assay.foreign_text import markdown_block
from assay_runners.planning.plan import Plan


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
