"""A job on a machine: a health check, the sessions, and a second health check; and its summary."""

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from assay.errors import AssayError, UsageError
from assay.foreign_text import escape_markdown, markdown_code
from assay.report.markdown import render_markdown
from assay.report.run_report import Report, read_report
from assay.runs.results import read_verdict
from assay.verdicts import Outcome
from assay_runners.fleet.entries import Fleet
from assay_runners.planning.plan import MachineJob, SessionCall

# EX_TEMPFAIL of sysexits.h: the machine is at fault, and another may succeed.
SICK = 75
# health.sh limits the vendor's program itself, to half of this.
_HEALTH_SECONDS = 120
_SICKNESS_PREFIX = "assay: this machine must not be used: "
# The results that a session writes below runs/. A session without results has failed. `check` also
# runs a model with a planted fault, whose verdict is rightly FAIL: only the clean run counts.
_RESULTS = {"check": "*-clean/verdict.json", "recapture": "captured/*.json"}
_VERDICTS = "**/verdict.json"


@dataclass(frozen=True)
class SessionResult:
    """The end of one session."""

    call: SessionCall
    code: int
    """The exit code of nox."""
    seconds: float
    files: tuple[Path, ...]
    """The verdicts that it wrote, or the expectations of a recapture."""

    @property
    def failure(self) -> str:
        """Why the session failed; "" if it passed."""
        if self.code:
            return f"exit code {self.code}"
        if not self.files:
            return "it did nothing: no result was left"
        return next(filter(None, map(_find_contradiction, self.runs)), "")

    @property
    def runs(self) -> list[Path]:
        """The folders with a verdict, without those inside another run."""
        folders = [file.parent for file in self.files if file.name == "verdict.json"]
        return [
            folder for folder in folders if not any(other in folder.parents for other in folders)
        ]


@dataclass(frozen=True)
class JobResult:
    """The end of a job on a machine."""

    job: MachineJob
    sick_before: str = ""
    """Why the machine must not be used; "" if it is healthy."""
    sessions: tuple[SessionResult, ...] = ()
    sick_after: str = ""

    @property
    def exit_code(self) -> int:
        """0; 1 if a session failed; SICK if the machine is at fault."""
        if self.sick_before or self.sick_after:
            return SICK
        return int(not self.sessions or any(session.failure for session in self.sessions))


@dataclass(frozen=True)
class Checkout:
    """A checkout in which sessions run."""

    root: Path
    nox: Sequence[str]
    """The words that start nox."""
    variables: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    """The environment."""

    def run_session(self, call: SessionCall, more: Mapping[str, str]) -> SessionResult:
        """Run a session to its end, with `more` variables."""
        before = self._find_results(call)
        started = time.monotonic()
        command = [*self.nox, *call.words]
        variables = {**self.variables, **more}
        code = subprocess.run(command, cwd=self.root, env=variables, check=False).returncode
        seconds = time.monotonic() - started
        after = self._find_results(call)
        written = sorted(path for path, age in after.items() if before.get(path) != age)
        return SessionResult(call, code, seconds, tuple(written))

    def _find_results(self, call: SessionCall) -> dict[Path, int]:
        """Find the results of such a session, with their modification times."""
        pattern = _RESULTS.get(call.session, _VERDICTS)
        return {path: path.stat().st_mtime_ns for path in self.root.glob(f"runs/{pattern}")}


def _find_contradiction(run: Path) -> str:
    """Say why the verdict of a run contradicts the success of its session; "" if it does not.

    On a laptop, a session may succeed although something was not compared; a job may not.
    """
    try:
        outcome = read_verdict(run).verdict
    except AssayError as error:
        return f"{run.name} has no verdict that can be read: {str(error).splitlines()[0]}"
    return "" if outcome is Outcome.PASS else f"{run.name} says {outcome.value}"


def run_machine_job(job: MachineJob, fleet: Fleet, checkout: Checkout) -> JobResult:
    """Run all sessions of `job` between two health checks. On a sick machine none runs."""
    sick = _find_sickness(job, fleet, checkout)
    if sick:
        return JobResult(job, sick_before=sick)
    sessions = tuple(checkout.run_session(call, job.variables) for call in job.calls)
    return JobResult(job, sessions=sessions, sick_after=_find_sickness(job, fleet, checkout))


def _find_sickness(job: MachineJob, fleet: Fleet, checkout: Checkout) -> str:
    """Say why the machine must not be used; "" if it is healthy or has no cards.

    Runs the script that the machine's own runner also calls before and after each job.
    Raises: UsageError if the fleet has no such machine.
    """
    runner = fleet.find(job.target)
    if runner is None:
        raise UsageError(f"runners/runners.toml has no machine {job.target!r}")
    if not job.cards or runner.vendor.health is None:
        return ""
    folder = checkout.root.resolve() / "runners"
    command = [folder / "health.sh", folder / runner.vendor.name / "health.json"]
    variables = {**checkout.variables, "ASSAY_CARDS": str(job.cards)}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_HEALTH_SECONDS,
            env=variables, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"health.sh cannot be run: {error}"
    if not done.returncode:
        return ""
    reason = done.stderr.strip() or f"health.sh exits with {done.returncode}"
    return reason.removeprefix(_SICKNESS_PREFIX)


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
