"""Runs an item of a session, and once more after a failure of the machine."""

import time
from pathlib import Path

from assay.errors import AssayError
from assay.report.publish import publish_one
from assay.report.run_report import read_report
from assay.runs import Progress
from assay.runs.results import write_results
from assay.verdicts import Level, Outcome, Verdict
from assay_smoke import COMPARED_UNIT
from assay_smoke.machine.failures import failed_part
from assay_smoke.session.items import SessionItem, run_item
from assay_smoke.session.results import CaseResult, peak_memory, phases_of, reason_of

MOST_TRIES = 2


def run_with_retry(item: SessionItem, session: Path, progress: Progress) -> CaseResult:
    """Run an item in a subfolder of the session."""
    tries: list[str] = []
    while True:
        folder = session / "cases" / item.name
        if tries:
            folder = folder.with_name(f"{item.name}.{len(tries) + 1}")
        folder.mkdir(parents=True)
        result = _run_once(item, session, folder, progress)
        update = {"tries": len(tries) + 1, "tried_again_for": tries[-1] if tries else None}
        result = result.model_copy(update=update)
        if result.infrastructure is None or len(tries) + 1 == MOST_TRIES:
            return result
        tries.append(result.infrastructure)


def _run_once(item: SessionItem, session: Path, folder: Path, progress: Progress) -> CaseResult:
    begun = time.monotonic()
    not_judged: str | None = None
    try:
        verdict = run_item(item, folder, progress)
    except AssayError as error:
        # A library may contradict its file, which is an error. A planned case has to be possible.
        not_judged = None if item.toml is None else str(error)
        verdict = write_results(_could_not_run(item, error), [], folder)
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


def _could_not_run(item: SessionItem, error: AssayError) -> Verdict:
    """Return a failed verdict for a planned case that raised."""
    level = Level(verdict=Outcome.FAIL, reason=f"could not run: {error}")
    return Verdict(
        verdict=Outcome.FAIL,
        candidate={"case": item.name},
        levels={"run": level},
        compared_unit=COMPARED_UNIT,
    )
