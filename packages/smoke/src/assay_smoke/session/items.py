"""The items of a session: cases of the matrix, and training libraries with a command line.

An item runs once more after a failure of the machine.
"""

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from assay.comparing.levels import failed
from assay.errors import AssayError
from assay.launch import TimeLimits
from assay.report.publish import publish_one
from assay.report.run_report import read_report
from assay.runs import Progress
from assay.runs.results import write_results
from assay.verdicts import Outcome, Verdict
from assay_smoke.cases.running import CaseRun
from assay_smoke.external.cycle import run_external
from assay_smoke.judging import verdict_of
from assay_smoke.machine.failures import failed_part
from assay_smoke.matrix.cases import Case
from assay_smoke.session.results import CaseResult, peak_memory, phases_of, reason_of

COMMAND = "command:"

_COLLECTIVE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class SessionItem:
    """A case or library that a session runs and judges."""

    name: str
    """Name in reports and of its folder."""
    command: str
    """Command that runs it alone."""
    run: Callable[[Path, Progress], Verdict]
    """Runs it and writes its verdict and logs into a folder. Sent to other processes."""
    num_cards: int | None = None
    """Number of devices that it uses; None for all."""
    is_planned: bool = True
    """False for a library, which may contradict its file. A planned case has to be possible."""


def case_item(
    case: Case, device: str, references: Path, trainer: str | None, timeout: float
) -> SessionItem:
    """Make the item of a case; see `CaseRun`. timeout: of a world, in seconds."""
    words = ["assay", "smoke", "run", case.id, "--device", device]
    words += ["--trainer", trainer] if trainer else []
    collective = min(_COLLECTIVE_SECONDS, timeout / 2)
    limits = TimeLimits(timeout, collective_seconds=collective, body_seconds=timeout)
    run = CaseRun(case, device, references, trainer, limits).run
    return SessionItem(case.id, shlex.join(words), run, case.cards)


def external_item(toml: Path) -> SessionItem:
    """Make the item of a library. examples/trl_sft/smoke-lora.toml gets the name `trl_sft-lora`."""
    folder, stem = toml.resolve().parent.name, toml.stem
    name = folder if stem == "smoke" else f"{folder}-{stem.removeprefix('smoke-')}"
    command = f"assay smoke run {COMMAND}{toml}"
    return SessionItem(name, command, partial(run_external, toml.resolve()), is_planned=False)


def run_with_retry(item: SessionItem, session: Path, progress: Progress) -> CaseResult:
    """Run an item in a subfolder of the session."""
    first = _run_once(item, session, item.name, progress)
    if first.infrastructure is None:
        return first
    second = _run_once(item, session, f"{item.name}.2", progress)
    return second.model_copy(update={"tries": 2, "tried_again_for": first.infrastructure})


def _run_once(item: SessionItem, session: Path, name: str, progress: Progress) -> CaseResult:
    folder = session / "cases" / name
    folder.mkdir(parents=True)
    begun = time.monotonic()
    not_judged: str | None = None
    try:
        verdict = item.run(folder, progress)
    except AssayError as error:
        not_judged = None if item.is_planned else str(error)
        found = {"run": failed(0, f"could not run: {error}")}
        verdict = verdict_of(found, candidate={"case": item.name})
        verdict = write_results(verdict, [], folder)
    publish_one(read_report(folder))
    seconds = time.monotonic() - begun
    host, device = peak_memory(folder)
    reason = reason_of(verdict)
    return CaseResult(
        name=item.name,
        outcome=verdict.verdict,
        seconds=seconds,
        reason=reason,
        diagnosis=verdict.diagnosis,
        error=not_judged,
        infrastructure=None if verdict.verdict is Outcome.PASS else failed_part(reason),
        command=item.command,
        folder=str(folder.relative_to(session)),
        phases=phases_of(folder),
        host_bytes=host,
        device_bytes=device,
    )
