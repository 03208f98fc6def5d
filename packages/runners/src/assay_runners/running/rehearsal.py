"""A rehearsal: what an event would start, run here in a clean clone, the CPU in a device's place."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from assay.runs import Progress
from assay_runners.fleet.reading import read_fleet
from assay_runners.planning.events import Event
from assay_runners.planning.plan import MachineJob, Plan, SessionCall
from assay_runners.planning.rules import make_plan
from assay_runners.planning.wording import nox_command, summarise_plan
from assay_runners.running.machine_job import Checkout, JobResult, SessionResult, run_machine_job
from assay_runners.running.summary import summarise_job
from assay_runners.workflow_run.commits import run_git
from assay_runners.workflow_run.events import files_changed_since

CLONE, SUMMARY_FILE = "clone", "summary.md"


@dataclass(frozen=True)
class Rehearsal:
    """What a rehearsal found.

    summary: the Markdown that GitHub would show.
    exit_code: 0; 1 if a session failed; 2 if something was refused.
    """

    summary: str
    exit_code: int


@dataclass(frozen=True)
class Rehearsed:
    """What to rehearse.

    event: the recorded event.
    patch: a change to commit on top of the checkout's HEAD first, as a pull request would; None if
        HEAD itself is the change.
    only: the sessions to run, of those that are chosen; all if empty.
    """

    event: Event
    patch: Path | None = None
    only: frozenset[str] = frozenset()


def rehearse(
    asked: Rehearsed, root: Path, folder: Path, nox: Sequence[str], progress: Progress
) -> Rehearsal:
    """Clone `root` into `folder`, and run there what the event starts.

    nox: the words that start nox.
    Raises: UsageError if the clone or the patch fails.
    """
    clone = folder / CLONE
    with progress.step("clones the last commit"):
        run_git(root, "clone", "--quiet", "--no-hardlinks", str(root), str(clone))
        base = run_git(clone, "rev-parse", "HEAD")
        if asked.patch:
            _commit_patch(clone, asked.patch)
        sha = run_git(clone, "rev-parse", "HEAD")
    event = asked.event
    if asked.patch:
        event = event.model_copy(update={"changed": files_changed_since(base, clone)})
    rehearsal = _run_plan(
        make_plan(event, read_fleet(clone)),
        sha,
        asked,
        Checkout(clone, nox, _variables()),
        progress,
    )
    (folder / SUMMARY_FILE).write_text(rehearsal.summary, encoding="utf-8")
    return rehearsal


def _run_plan(
    plan: Plan, sha: str, asked: Rehearsed, checkout: Checkout, progress: Progress
) -> Rehearsal:
    blocks = [summarise_plan(plan)]
    hosted = _run_tiers(plan, checkout, asked.only, progress)
    if hosted:
        blocks.append(_summarise_tiers(hosted))
    failed = any(session.code for session in hosted)
    results: list[JobResult] = []
    if failed and plan.machines:
        blocks.append("The jobs on machines would not start: a session before them failed.")
    elif not failed:
        results = list(_run_machines(plan, asked.only, checkout, progress))
        blocks += [summarise_job(result, sha) for result in results]
    red = failed or any(result.exit_code for result in results)
    return Rehearsal("\n".join(blocks), 2 if plan.refused else int(red))


def _run_machines(
    plan: Plan, only: frozenset[str], checkout: Checkout, progress: Progress
) -> Iterator[JobResult]:
    fleet = read_fleet(checkout.root)
    for machine in plan.machines:
        job = _on_the_cpu(machine, only)
        if job.calls:
            with progress.step(f"runs {machine.tier} of assay-{machine.target} on the CPU"):
                yield run_machine_job(job, fleet, checkout)


def _variables() -> dict[str, str]:
    """The environment of the sessions: a card that this machine lacks is played by the CPU."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GITHUB_")}
    return kept | {"ASSAY_TORCH": "cpu", "ASSAY_REQUIRE_HARDWARE": "0"}


def _run_tiers(
    plan: Plan, checkout: Checkout, only: frozenset[str], progress: Progress
) -> list[SessionResult]:
    """Each session once: this machine has one Python."""
    results = []
    for session in dict.fromkeys(job.session for job in plan.tiers):
        if not only or session in only:
            with progress.step(f"runs {session}"):
                results.append(checkout.run_session(SessionCall(session=session), {}))
    return results


def _on_the_cpu(machine: MachineJob, only: frozenset[str]) -> MachineJob:
    """The same job without its cards."""
    calls = tuple(call for call in machine.calls if not only or call.session in only)
    return machine.model_copy(update={"cards": 0, "calls": calls})


def _summarise_tiers(results: list[SessionResult]) -> str:
    lines = ["| session | result | time |", "|---|---|--:|"]
    for result in results:
        ended = f"FAILS: `{nox_command(result.call)}` repeats it" if result.code else "passes"
        lines.append(f"| `{result.call.session}` | {ended} | {result.seconds:.0f} s |")
    return "\n".join(lines) + "\n"


def _commit_patch(clone: Path, patch: Path) -> None:
    run_git(clone, "apply", "--index", str(patch.resolve()))
    who = ("-c", "user.name=rehearsal", "-c", "user.email=rehearsal@localhost")
    run_git(clone, *who, "commit", "--quiet", "--no-verify", "-m", f"rehearse {patch.name}")
