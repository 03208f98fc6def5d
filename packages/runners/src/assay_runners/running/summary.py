"""The summary of a job on a machine: its failures, and the commands that repeat them."""

from itertools import chain
from typing import Any

from assay.errors import AssayError
from assay.foreign_text import escape_markdown, markdown_code
from assay.report.markdown import render_markdown
from assay.report.run_report import Report, read_report
from assay.verdicts import Outcome
from assay_runners.running.machine_job import JobResult, SessionResult

_WORST_FIRST = (Outcome.FAIL, Outcome.NOT_COMPARED, Outcome.PASS)


def summarize_job(result: JobResult, sha: str, enter: str = "") -> str:
    """Write Markdown: the result of each session, the environment, and every run's report, worst first.

    sha: the commit that ran.
    enter: the command that goes to this commit; "" checks it out.
    """
    job = result.job
    state = {0: "passes", 1: "FAILS"}.get(result.exit_code, "the machine is sick")
    blocks = [
        f"# {job.tier} on assay-{job.target}: {state}",
        f"Commit {markdown_code(sha)}, {escape_markdown(job.why)}.",
    ]
    if result.sick_before:
        reason = markdown_code(result.sick_before)
        blocks.append(f"Nothing ran: {reason}. Another machine may succeed.")
    reports, unreadable = _read_reports(result.sessions)
    if result.sessions:
        blocks.append(_table(result.sessions))
    if reports:
        blocks.append(f"Environment: {markdown_code(_describe(reports[0].verdict.environment))}.")
    if result.sick_after:
        reason = markdown_code(result.sick_after)
        blocks.append(f"The machine is sick after the job, which may be the cause: {reason}.")
    if failed := [session for session in result.sessions if session.failure]:
        commands = "\n".join(str(session.call) for session in failed)
        repeat = f"```bash\n{enter or f'git checkout {sha}'}\n{commands}\n```"
        blocks.append(f"Repeat the failures, on such a machine or on the CPU:\n\n{repeat}")
    blocks += unreadable
    blocks += [render_markdown(report).rstrip() for report in reports]
    return "\n\n".join(blocks) + "\n"


def _describe(environment: dict[str, Any]) -> str:
    """Name the versions and the image of a verdict's environment."""
    facts = {
        "Python": environment.get("python"),
        **environment.get("versions", {}),
        "image": environment.get("variables", {}).get("ASSAY_CONTAINER"),
    }
    shown = [name for name in ("Python", "torch", "transformers", "image") if facts.get(name)]
    return ", ".join(f"{name} {facts[name]}" for name in shown) or "not known"


def _table(sessions: tuple[SessionResult, ...]) -> str:
    lines = ["| session | result | left | time |", "|---|---|--:|--:|"]
    for session in sessions:
        cells = (
            markdown_code(session.call.session),
            escape_markdown(session.failure or "passes"),
            str(len(session.files)),
            f"{session.seconds:.0f} s",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _read_reports(sessions: tuple[SessionResult, ...]) -> tuple[list[Report], list[str]]:
    """Read the reports of all runs, worst first. Returns: also a sentence for each unreadable run."""
    reports, unreadable = [], []
    for folder in chain.from_iterable(session.runs for session in sessions):
        try:
            reports.append(read_report(folder))
        except AssayError as error:
            unreadable.append(f"{markdown_code(folder.name)}: {markdown_code(str(error))}")
    reports.sort(key=lambda report: _WORST_FIRST.index(report.verdict.verdict))
    return reports, unreadable
