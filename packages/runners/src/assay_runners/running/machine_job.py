"""A job on a machine: is it healthy, what do the sessions say, is it still healthy?"""

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from assay.errors import AssayError, UsageError
from assay.runs.results import read_verdict
from assay.verdicts import Outcome
from assay_runners.fleet.entries import Fleet
from assay_runners.planning.plan import MachineJob, SessionCall
from assay_runners.running.health import find_sickness

# EX_TEMPFAIL of sysexits.h: the machine is at fault, and another may succeed.
SICK = 75
# What a session leaves below runs/ when it did something: none of it is no success.
# Of `check` the run of the clean model: the other has a fault planted, and is right to fail.
_LEFT_BY = {"check": "*-clean/verdict.json", "recapture": "captured/*.json"}
_VERDICTS = "**/verdict.json"


@dataclass(frozen=True)
class SessionResult:
    """How one session ended.

    code: the exit code of nox.
    left: the files that it left: verdicts, or expectations of a recapture.
    """

    call: SessionCall
    code: int
    seconds: float
    left: tuple[Path, ...]

    @property
    def failure(self) -> str:
        """Why it is no success; "" where it is one."""
        if self.code:
            return f"exit code {self.code}"
        if not self.left:
            return "it did nothing: no result was left"
        return next(filter(None, map(_contradiction, self.runs)), "")

    @property
    def runs(self) -> list[Path]:
        """The folders with a verdict, without those that are part of another's."""
        folders = [file.parent for file in self.left if file.name == "verdict.json"]
        return [
            folder for folder in folders if not any(other in folder.parents for other in folders)
        ]


@dataclass(frozen=True)
class JobResult:
    """How a job on a machine ended.

    sick_before, sick_after: why the machine must not be used; "" where it may.
    """

    job: MachineJob
    sick_before: str = ""
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
    """Where a job runs.

    root: the checkout.
    nox: the words that start nox there.
    variables: the environment.
    """

    root: Path
    nox: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def run_session(self, call: SessionCall, more: Mapping[str, str]) -> SessionResult:
        """Run a session to its end."""
        before = self._left_by(call)
        words = ["--", *call.arguments] if call.arguments else []
        started = time.monotonic()
        command = [*self.nox, "-s", call.session, *words]
        variables = {**self.variables, **more}
        code = subprocess.run(command, cwd=self.root, env=variables, check=False).returncode
        seconds = time.monotonic() - started
        left = sorted(path for path, age in self._left_by(call).items() if before.get(path) != age)
        return SessionResult(call, code, seconds, tuple(left))

    def _left_by(self, call: SessionCall) -> dict[Path, int]:
        """The files that such a session leaves, and when each was written."""
        pattern = _LEFT_BY.get(call.session, _VERDICTS)
        return {path: path.stat().st_mtime_ns for path in self.root.glob(f"runs/{pattern}")}


def _contradiction(run: Path) -> str:
    """What in a run's verdict contradicts a session that succeeded; "" where nothing does.

    A session on a laptop may end well with something that was not compared; a job was asked for it.
    """
    try:
        outcome = read_verdict(run).verdict
    except AssayError as error:
        return f"{run.name} has no verdict that can be read: {str(error).splitlines()[0]}"
    return "" if outcome is Outcome.PASS else f"{run.name} says {outcome.value}"


def run_machine_job(job: MachineJob, fleet: Fleet, checkout: Checkout) -> JobResult:
    """Run the sessions of `job`, all of them, between two looks at the machine's health.

    A sick machine runs none: what it computes says nothing.
    """
    sick = _find_sickness(job, fleet, checkout)
    if sick:
        return JobResult(job, sick_before=sick)
    sessions = tuple(checkout.run_session(call, job.variables) for call in job.calls)
    return JobResult(job, sessions=sessions, sick_after=_find_sickness(job, fleet, checkout))


def _find_sickness(job: MachineJob, fleet: Fleet, checkout: Checkout) -> str:
    """Why the job's machine must not be used; one without cards cannot be sick.

    Raises: UsageError if there is no such machine.
    """
    runner = fleet.find(job.target)
    if runner is None:
        raise UsageError(f"runners/runners.toml has no machine {job.target!r}")
    if not job.cards or runner.vendor.health is None:
        return ""
    folder = checkout.root.resolve() / "runners"
    settings = folder / runner.vendor.name / "health.json"
    return find_sickness(folder / "health.sh", settings, job.cards, checkout.variables)
