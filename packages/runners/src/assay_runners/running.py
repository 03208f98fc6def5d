"""Runs planned jobs, and summarizes them: on a machine with cards, or as a rehearsal in a clean clone.

A job on a machine is a health check, its sessions, and a second health check. A rehearsal runs all jobs of an
event in a clone, with the CPU instead of accelerators.
"""

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from assay.ci.running import find_contradiction, outermost, read_reports
from assay.errors import UsageError
from assay.files import write_whole
from assay.foreign_text import escape_markdown, markdown_code
from assay.report.page.html import render_page
from assay.report.text_formats import render_markdown
from assay.runs import Progress
from assay.runs.results import VERDICT_FILE
from assay.verdicts import Outcome, overall_outcome
from assay_runners.fleet import Fleet, read_fleet
from assay_runners.planning import (
    Event,
    MachineJob,
    Plan,
    SessionCall,
    explain_plan,
    make_plan,
    summarize_plan,
)
from assay_runners.workflow_run import files_changed_since, run_git

# EX_TEMPFAIL of sysexits.h: the machine is at fault, and another may succeed.
SICK = 75
# health.sh limits the vendor's program itself, to half of this.
_HEALTH_SECONDS = 120
_SICKNESS_PREFIX = "assay: this machine must not be used: "
# The results that a session writes below runs/. A session without results has failed. `check` also
# runs a model with a planted fault, whose verdict is rightly FAIL: only the clean run counts.
_RESULTS = {"check": "*/clean/verdict.json", "recapture": "captured/*.json"}
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
    has_results: bool = True
    """False for linters and tests, which only have an exit code."""

    @cached_property
    def failure(self) -> str:
        """Why the session failed; "" if it passed."""
        if self.code:
            return f"exit code {self.code}"
        if not self.has_results:
            return ""
        if not self.files:
            return "it did nothing: no result was left"
        return next(filter(None, map(find_contradiction, self.runs)), "")

    @property
    def outcome(self) -> Outcome:
        """FAIL, or PASS."""
        return Outcome.FAIL if self.failure else Outcome.PASS

    @property
    def runs(self) -> list[Path]:
        """The folders with a verdict, without those inside another run."""
        return outermost(file.parent for file in self.files if file.name == VERDICT_FILE)


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

    def run_session(
        self, call: SessionCall, more: Mapping[str, str], *, has_results: bool = True
    ) -> SessionResult:
        """Run a session to its end, with `more` variables."""
        before = self._find_results(call)
        started = time.monotonic()
        command = [*self.nox, *call.words]
        variables = {**self.variables, **more}
        code = subprocess.run(command, cwd=self.root, env=variables, check=False).returncode
        seconds = time.monotonic() - started
        after = self._find_results(call)
        written = sorted(path for path, age in after.items() if before.get(path) != age)
        return SessionResult(call, code, seconds, tuple(written), has_results)

    def _find_results(self, call: SessionCall) -> dict[Path, int]:
        """Find the results of such a session, with their modification times."""
        pattern = _RESULTS.get(call.session, _VERDICTS)
        return {path: path.stat().st_mtime_ns for path in self.root.glob(f"runs/{pattern}")}


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
    runs = chain.from_iterable(session.runs for session in result.sessions)
    reports, unreadable = read_reports(runs)
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


PAGE_FILE, CLONE, SUMMARY_FILE = "index.html", "clone", "summary.md"


@dataclass(frozen=True)
class RehearsedJob:
    """A planned job, and the end of its sessions."""

    name: str
    needs: Sequence[str] = ()
    """The jobs that pass before it starts."""
    sessions: Sequence[SessionResult] = ()
    """Empty if the job did not start."""
    summary: str = ""
    """The Markdown that GitHub would show."""

    @property
    def outcome(self) -> Outcome | None:
        """FAIL if a session failed; None if the job did not start."""
        return overall_outcome(one.outcome for one in self.sessions) if self.sessions else None


@dataclass(frozen=True)
class Rehearsal:
    """The result of a rehearsal."""

    summary: str
    """The Markdown that GitHub would show."""
    exit_code: int
    """0; 1 if a session failed; 2 if a request was refused."""
    jobs: Sequence[RehearsedJob]


def rehearse(
    event: Event,
    patch: Path | None,
    only: frozenset[str],
    root: Path,
    folder: Path,
    nox: Sequence[str],
    progress: Progress,
) -> Rehearsal:
    """Clone `root` into `folder`, and run the jobs of the event there.

    After a failure the clone keeps its nox environments (2 GB), to repeat the failure.
    patch: a change to commit on top of HEAD. Its files replace the event's changed files.
    only: the planned sessions to run; all if empty.
    nox: the words that start nox.
    Raises: UsageError if the clone or the patch fails, or the plan lacks a session of `only`.
    """
    clone = folder / CLONE
    with progress.step("clones the last commit"):
        run_git(root, "clone", "--quiet", "--no-hardlinks", str(root), str(clone))
        base = run_git(clone, "rev-parse", "HEAD")
        if patch:
            run_git(clone, "apply", "--index", str(patch.resolve()))
            who = ("-c", "user.name=rehearsal", "-c", "user.email=rehearsal@localhost")
            message = f"rehearse {patch.name}"
            run_git(clone, *who, "commit", "--quiet", "--no-verify", "-m", message)
        sha = run_git(clone, "rev-parse", "HEAD")
    if patch:
        event = event.model_copy(update={"changed": files_changed_since(base, clone)})
    plan = make_plan(event, read_fleet(clone))
    run = _PlannedRun(plan, sha, only, Checkout(clone, nox, _variables()), progress)
    if run.sessions and (unknown := only - set(run.sessions)):
        raise UsageError(
            f"--only {', '.join(sorted(unknown))}: the event starts {', '.join(sorted(run.sessions))}"
        )
    rehearsal = run.execute()
    (folder / SUMMARY_FILE).write_text(rehearsal.summary, encoding="utf-8")
    explained = "\n".join([explain_plan(plan), *run.describe_differences()])
    _write_page(rehearsal, explained, folder)
    if not rehearsal.exit_code:
        shutil.rmtree(clone / ".nox", ignore_errors=True)
    return rehearsal


def _write_page(rehearsal: Rehearsal, plan: str, folder: Path) -> None:
    """Write the page into `folder`, which also has the clone. plan: the explained plan."""

    def find_pages(session: SessionResult) -> Iterator[tuple[str, str]]:
        """Yield the name of each run and the address of its page."""
        for run in session.runs:
            for page in sorted(run.glob("*.html")):
                yield run.name, page.relative_to(folder).as_posix()

    page = render_page(
        Path(__file__).with_name("templates") / "rehearsal.html.j2",
        jobs=rehearsal.jobs,
        plan=plan,
        outcome=Outcome.FAIL if rehearsal.exit_code else Outcome.PASS,
        find_pages=find_pages,
    )
    write_whole(folder / PAGE_FILE, page)


@dataclass(frozen=True)
class _PlannedRun:
    """The jobs of a plan in GitHub's order: tiers, then the training, then machines."""

    plan: Plan
    sha: str
    only: frozenset[str]
    checkout: Checkout
    progress: Progress

    @property
    def sessions(self) -> list[str]:
        """The distinct sessions of the plan, in the order in which they run."""
        calls = [*self.plan.afterwards, *(call for job in self.plan.machines for call in job.calls)]
        of_tiers = [job.session for job in self.plan.tiers]
        return list(dict.fromkeys(of_tiers + [call.session for call in calls]))

    def execute(self) -> Rehearsal:
        """Run all jobs whose predecessors pass."""
        blocks = [summarize_plan(self.plan), *self.describe_differences()]
        # Each session runs once: this machine has one Python.
        names = dict.fromkeys(job.session for job in self.plan.tiers)
        tiers = self._run_calls([SessionCall(session=name) for name in names], has_results=False)
        jobs = [RehearsedJob(one.call.session, sessions=[one]) for one in tiers]
        before = [job.name for job in jobs]
        if self.plan.afterwards:
            failed = any(one.failure for one in tiers)
            after = [] if failed else self._run_calls(self.plan.afterwards)
            jobs.append(RehearsedJob("training on the CPU", before, after))
        hosted = [session for job in jobs for session in job.sessions]
        failed = any(session.failure for session in hosted)
        if hosted:
            blocks.append(_summarize_hosted(hosted))
        results: list[JobResult] = []
        if failed and self.plan.machines:
            blocks.append("The jobs on machines would not start: a session before them failed.")
            jobs += [RehearsedJob(_name_job(machine), before) for machine in self.plan.machines]
        elif not failed:
            results = self._run_machines()
            enter = f"cd {shlex.quote(str(self.checkout.root))}"
            for result in results:
                summary = summarize_job(result, self.sha, enter)
                jobs.append(RehearsedJob(_name_job(result.job), before, result.sessions, summary))
                blocks.append(summary)
            blocks += self._proposal(results)
        red = failed or any(result.exit_code for result in results)
        return Rehearsal("\n".join(blocks), 2 if self.plan.refused else int(red), jobs)

    def describe_differences(self) -> list[str]:
        """Describe the differences from a run on GitHub; [] if nothing runs."""
        if not self.sessions:
            return []
        cpu = " The CPU replaces every accelerator." if self.plan.machines else ""
        left_out = [name for name in self.sessions if not self._is_selected(name)]
        only = f" Left out by --only: {', '.join(left_out)}." if left_out else ""
        return [f"Rehearsed on one machine, with one Python.{cpu}{only}\n"]

    def _is_selected(self, session: str) -> bool:
        return not self.only or session in self.only

    def _run_calls(
        self, calls: Sequence[SessionCall], *, has_results: bool = True
    ) -> list[SessionResult]:
        results = []
        for call in calls:
            if self._is_selected(call.session):
                with self.progress.step(f"running {call}"):
                    results.append(self.checkout.run_session(call, {}, has_results=has_results))
        return results

    def _run_machines(self) -> list[JobResult]:
        fleet = read_fleet(self.checkout.root)
        results = []
        for machine in self.plan.machines:
            calls = tuple(call for call in machine.calls if self._is_selected(call.session))
            job: MachineJob = machine.model_copy(update={"cards": 0, "calls": calls})
            if calls:
                with self.progress.step(f"running {_name_job(machine)}"):
                    results.append(run_machine_job(job, fleet, self.checkout))
        return results

    def _proposal(self, results: list[JobResult]) -> list[str]:
        """Write the pull request that a recapture would open."""
        reasons = [
            call.arguments[call.arguments.index("--reason") + 1]
            for result in results
            for call in result.job.calls
            if call.session == "recapture"
        ]
        if not reasons or any(result.exit_code for result in results):
            return []
        file = self.checkout.root / "runs" / "proposal.md"
        words = ("runs", "--dry-run", "--reason", reasons[0])
        call = SessionCall(session="propose", arguments=words)
        with self.progress.step("writing the pull request"):
            proposed = self.checkout.run_session(call, {"GITHUB_STEP_SUMMARY": str(file)})
        if proposed.code:
            return [f"The pull request cannot be opened: `{call}` fails.\n"]
        return [f"# The pull request\n\n{file.read_text(encoding='utf-8')}"]


def _name_job(machine: MachineJob) -> str:
    return f"{machine.tier} of assay-{machine.target} on the CPU"


def _variables() -> dict[str, str]:
    """Make the environment of the sessions, which use the CPU instead of accelerators."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GITHUB_")}
    return kept | {"ASSAY_TORCH": "cpu", "ASSAY_REQUIRE_HARDWARE": "0"}


def _summarize_hosted(hosted: Sequence[SessionResult]) -> str:
    lines = ["| session | result | time |", "|---|---|--:|"]
    for one in hosted:
        outcome = f"FAILS, {one.failure}: `{one.call}` repeats it" if one.failure else "passes"
        lines.append(f"| `{one.call.session}` | {outcome} | {one.seconds:.0f} s |")
    return "\n".join(lines) + "\n"
