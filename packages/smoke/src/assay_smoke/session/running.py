"""A session: every case run, tried again where the machine failed, and written down at once."""

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from assay.errors import AssayError
from assay.launch import TimeLimits
from assay.runs import Progress
from assay.runs.folders import write_whole
from assay.runs.results import write_results
from assay.verdicts import Level, Outcome, Verdict
from assay_smoke.cases.running import CaseRun, References
from assay_smoke.matrix.cases import Case
from assay_smoke.session.infrastructure import failed_part
from assay_smoke.session.results import (
    CaseResult,
    SessionReport,
    peak_memory,
    phases_of,
    reason_of,
)

REPORT_FILE = "session.json"

# A failure of the machine is tried once more; anything else is as it is.
MOST_TRIES = 2


@dataclass(frozen=True)
class Subject:
    """Anything that a session runs and judges as one.

    command: what to type for it alone.
    run: writes verdict and logs into the folder that it is given.
    """

    name: str
    command: str
    run: Callable[[Path, Progress], Verdict]


@dataclass
class Session:
    """Runs subjects one after the other.

    folder: of the session; each subject has one of its own below it.
    device: as in a RUN.
    tell: called with every result, as soon as it is there.
    """

    folder: Path
    device: str
    tell: Callable[[CaseResult, int, int], None]
    results: list[CaseResult] = field(default_factory=list)

    def run(self, subjects: Sequence[Subject], progress: Progress) -> None:
        """Run all, in this order. After an interruption the results so far are written."""
        for subject in subjects:
            self.results.append(self._run_one(subject, progress))
            self.tell(self.results[-1], len(self.results), len(subjects))

    def write(self, seconds: float, pairs: tuple[int, int]) -> SessionReport:
        """Write the report of what has run; pairs: how many values meet, of how many that can."""
        report = SessionReport(
            schema=1,
            device=self.device,
            cases=self.results,
            seconds=seconds,
            pairs_covered=pairs[0],
            pairs_possible=pairs[1],
        )
        write_whole(self.folder / REPORT_FILE, report.model_dump_json(by_alias=True, indent=1))
        return report

    def _run_one(self, subject: Subject, progress: Progress) -> CaseResult:
        tries: list[str] = []
        while True:
            folder = self.folder / "cases" / subject.name
            if tries:
                folder = folder.with_name(f"{subject.name}.{len(tries) + 1}")
            folder.mkdir(parents=True)
            result = self._try(subject, folder, progress)
            if result.infrastructure is None and tries:
                result = result.model_copy(update={"infrastructure": tries[-1]})
            if result.outcome is Outcome.PASS or not failed_part(result.reason):
                return result.model_copy(update={"tries": len(tries) + 1})
            tries.append(str(result.infrastructure))
            if len(tries) == MOST_TRIES:
                return result.model_copy(update={"tries": len(tries)})

    def _try(self, subject: Subject, folder: Path, progress: Progress) -> CaseResult:
        begun = time.monotonic()
        try:
            verdict = subject.run(folder, progress)
        except AssayError as error:
            verdict = write_results(_could_not_run(subject, error), [], folder)
        seconds = time.monotonic() - begun
        host, device = peak_memory(folder)
        reason = reason_of(verdict)
        return CaseResult(
            name=subject.name,
            outcome=verdict.verdict,
            seconds=seconds,
            reason=reason,
            diagnosis=verdict.diagnosis,
            infrastructure=failed_part(reason),
            command=subject.command,
            folder=str(folder.relative_to(self.folder)),
            phases=phases_of(folder),
            host_bytes=host,
            device_bytes=device,
        )


def subject_of(
    case: Case,
    device: str,
    references: References,
    trainer: str | None,
    limits: TimeLimits,
) -> Subject:
    """A case of the matrix as a subject of a session."""

    def run(folder: Path, progress: Progress) -> Verdict:
        return CaseRun(case, device, folder, references, trainer, limits).run(progress)

    words = ["assay", "smoke", "run", case.id, "--device", device]
    words += ["--trainer", trainer] if trainer else []
    return Subject(case.id, shlex.join(words), run)


def _could_not_run(subject: Subject, error: AssayError) -> Verdict:
    """A case that its plan holds to be possible, and that raised: as much of a failure as any."""
    level = Level(verdict=Outcome.FAIL, reason=f"it could not be run: {error}")
    return Verdict(verdict=Outcome.FAIL, candidate={"case": subject.name}, levels={"run": level})
