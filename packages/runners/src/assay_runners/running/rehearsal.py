"""A rehearsal: runs the jobs of an event in a clean clone, with the CPU instead of accelerators."""

import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from assay.errors import UsageError
from assay.files import write_whole
from assay.report.page.html import render_page
from assay.runs import Progress
from assay.verdicts import Outcome
from assay_runners.fleet.reading import read_fleet
from assay_runners.planning.events import Event
from assay_runners.planning.plan import MachineJob, Plan, SessionCall, explain_plan, summarize_plan
from assay_runners.planning.rules import make_plan
from assay_runners.running.machine_job import (
    Checkout,
    JobResult,
    SessionResult,
    run_machine_job,
    summarize_job,
)
from assay_runners.workflow_run.programs import files_changed_since, run_git

PAGE_FILE = "index.html"


@dataclass(frozen=True)
class RehearsedJob:
    """A planned job, and the end of its sessions."""

    name: str
    needs: Sequence[str] = ()
    """The jobs that pass before it starts."""
    sessions: Sequence[tuple[SessionResult, str]] = ()
    """Each with its failure; "" for a success. Empty if the job did not start."""
    summary: str = ""
    """The Markdown that GitHub would show."""

    @property
    def outcome(self) -> Outcome | None:
        """FAIL if a session failed; None if the job did not start."""
        if not self.sessions:
            return None
        return judge_session("".join(failure for _, failure in self.sessions))


def judge_session(failure: str) -> Outcome:
    """Return the outcome of a session with this failure."""
    return Outcome.FAIL if failure else Outcome.PASS


def write_page(jobs: Sequence[RehearsedJob], plan: str, exit_code: int, folder: Path) -> Path:
    """Write the page into `folder`, which also has the checkout. plan: the explained plan."""

    def find_pages(session: SessionResult) -> Iterator[tuple[str, str]]:
        """Yield the name of each run and the address of its page."""
        for run in session.runs:
            for page in sorted(run.glob("*.html")):
                yield run.name, page.relative_to(folder).as_posix()

    page = render_page(
        Path(__file__).with_name("rehearsal.html.j2"),
        jobs=jobs,
        plan=plan,
        outcome=judge_session("red" if exit_code else ""),
        judge_session=judge_session,
        find_pages=find_pages,
    )
    return write_whole(folder / PAGE_FILE, page)


CLONE, SUMMARY_FILE = "clone", "summary.md"


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
    Raises: UsageError if the clone or the patch fails.
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
    _require_planned_sessions(only, plan)
    run = _PlannedRun(plan, sha, only, Checkout(clone, nox, _variables()), progress)
    rehearsal = run.execute()
    (folder / SUMMARY_FILE).write_text(rehearsal.summary, encoding="utf-8")
    explained = "\n".join([explain_plan(plan), *run.describe_differences()])
    write_page(rehearsal.jobs, explained, rehearsal.exit_code, folder)
    if not rehearsal.exit_code:
        shutil.rmtree(clone / ".nox", ignore_errors=True)
    return rehearsal


def _require_planned_sessions(only: frozenset[str], plan: Plan) -> None:
    """Raise UsageError if the plan does not have a requested session, which would not run."""
    chosen = _planned_sessions(plan)
    if chosen and (unknown := only - set(chosen)):
        raise UsageError(
            f"--only {', '.join(sorted(unknown))}: the event starts {', '.join(sorted(chosen))}"
        )


def _planned_sessions(plan: Plan) -> list[str]:
    """List the distinct sessions of a plan, in the order in which they run."""
    calls = [*plan.afterwards, *(call for machine in plan.machines for call in machine.calls)]
    return list(dict.fromkeys([job.session for job in plan.tiers] + [one.session for one in calls]))


@dataclass(frozen=True)
class _PlannedRun:
    """The jobs of a plan in GitHub's order: tiers, then the training, then machines."""

    plan: Plan
    sha: str
    only: frozenset[str]
    checkout: Checkout
    progress: Progress

    def execute(self) -> Rehearsal:
        """Run all jobs whose predecessors pass."""
        blocks = [summarize_plan(self.plan), *self.describe_differences()]
        # Each session runs once: this machine has one Python.
        names = dict.fromkeys(job.session for job in self.plan.tiers)
        jobs = []
        for session in self._run_calls([SessionCall(session=name) for name in names]):
            failure = f"exit code {session.code}" if session.code else ""
            jobs.append(RehearsedJob(session.call.session, sessions=[(session, failure)]))
        before = [job.name for job in jobs]
        failed = Outcome.FAIL in (job.outcome for job in jobs)
        if self.plan.afterwards:
            after = [] if failed else self._run_calls(self.plan.afterwards)
            sessions = [(session, session.failure) for session in after]
            jobs.append(RehearsedJob("training on the CPU", before, sessions))
        hosted = [session for job in jobs for session in job.sessions]
        failed = any(failure for _, failure in hosted)
        if hosted:
            blocks.append(_summarize_hosted(hosted))
        results: list[JobResult] = []
        if failed and self.plan.machines:
            blocks.append("The jobs on machines would not start: a session before them failed.")
            jobs += [RehearsedJob(_name_job(machine), before) for machine in self.plan.machines]
        elif not failed:
            results = self._run_machines()
            enter = f"cd {shlex.quote(str(self.checkout.root))}"
            summaries = [summarize_job(result, self.sha, enter) for result in results]
            for result, summary in zip(results, summaries, strict=True):
                sessions = [(session, session.failure) for session in result.sessions]
                jobs.append(RehearsedJob(_name_job(result.job), before, sessions, summary))
            blocks += [*summaries, *self._proposal(results)]
        red = failed or any(result.exit_code for result in results)
        return Rehearsal("\n".join(blocks), 2 if self.plan.refused else int(red), jobs)

    def describe_differences(self) -> list[str]:
        """Describe the differences from a run on GitHub; [] if nothing runs."""
        chosen = _planned_sessions(self.plan)
        if not chosen:
            return []
        cpu = " The CPU replaces every accelerator." if self.plan.machines else ""
        left_out = [name for name in chosen if not self._is_selected(name)]
        only = f" Left out by --only: {', '.join(left_out)}." if left_out else ""
        return [f"Rehearsed on one machine, with one Python.{cpu}{only}\n"]

    def _is_selected(self, session: str) -> bool:
        return not self.only or session in self.only

    def _run_calls(self, calls: Sequence[SessionCall]) -> list[SessionResult]:
        results = []
        for call in calls:
            if self._is_selected(call.session):
                with self.progress.step(f"runs {call}"):
                    results.append(self.checkout.run_session(call, {}))
        return results

    def _run_machines(self) -> list[JobResult]:
        """Run the job of every machine on the CPU."""
        fleet = read_fleet(self.checkout.root)
        results = []
        for machine in self.plan.machines:
            calls = tuple(call for call in machine.calls if self._is_selected(call.session))
            job: MachineJob = machine.model_copy(update={"cards": 0, "calls": calls})
            if calls:
                with self.progress.step(f"runs {_name_job(machine)}"):
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
        with self.progress.step("writes the pull request"):
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


def _summarize_hosted(hosted: list[tuple[SessionResult, str]]) -> str:
    """Write a table of sessions, each with its failure; "" for a success."""
    lines = ["| session | result | time |", "|---|---|--:|"]
    for result, failure in hosted:
        outcome = f"FAILS, {failure}: `{result.call}` repeats it" if failure else "passes"
        lines.append(f"| `{result.call.session}` | {outcome} | {result.seconds:.0f} s |")
    return "\n".join(lines) + "\n"
