"""The items of a session: cases of the matrix, and training libraries with a command line.

An item runs once more after a failure of the machine.
"""

import shlex
import time
from pathlib import Path

from assay.errors import AssayError
from assay.launch import TimeLimits
from assay.report.publish import publish_one
from assay.report.run_report import read_report
from assay.runs import Progress
from assay.runs.results import write_results
from assay.verdicts import Level, Outcome, Record, Verdict
from assay_smoke import COMPARED_UNIT
from assay_smoke.cases.running import CaseRun
from assay_smoke.external.cycle import run_external
from assay_smoke.machine.failures import failed_part
from assay_smoke.matrix.cases import Case, case_of
from assay_smoke.session.results import CaseResult, peak_memory, phases_of, reason_of

COMMAND = "command:"


class CaseOptions(Record):
    """Options of all cases in a session."""

    device: str
    """As in a RUN."""
    references: str
    """Folder of the reference runs."""
    trainer: str | None = None
    """Replaces each framework's own trainer."""
    timeout: float
    """Limit of a world of ranks, in seconds."""
    collective_timeout: float
    """Limit of one collective, in seconds."""


class SessionItem(Record):
    """A case or library that a session runs and judges."""

    name: str
    """Name in reports and of its folder."""
    command: str
    """Command that runs it alone."""
    num_cards: int | None = None
    """Number of devices that it uses; None for all."""
    toml: str | None = None
    """File that describes an external library."""
    options: CaseOptions | None = None
    """Options of a case of the matrix."""


def case_item(case: Case, options: CaseOptions) -> SessionItem:
    """Make the item of a case."""
    words = ["assay", "smoke", "run", case.id, "--device", options.device]
    words += ["--trainer", options.trainer] if options.trainer else []
    return SessionItem(
        name=case.id, command=shlex.join(words), num_cards=case.cards, options=options
    )


def external_item(toml: Path) -> SessionItem:
    """Make the item of a library. examples/trl_sft/smoke-lora.toml gets the name `trl_sft-lora`."""
    folder, stem = toml.resolve().parent.name, toml.stem
    return SessionItem(
        name=folder if stem == "smoke" else f"{folder}-{stem.removeprefix('smoke-')}",
        command=f"assay smoke run {COMMAND}{toml}",
        toml=str(toml.resolve()),
    )


def run_item(item: SessionItem, folder: Path, progress: Progress) -> Verdict:
    """Run an item. Write its verdict and logs into `folder`."""
    options = item.options
    if options is None:
        return run_external(Path(str(item.toml)), folder, progress)
    limits = TimeLimits(
        start_seconds=options.timeout,
        collective_seconds=options.collective_timeout,
        body_seconds=options.timeout,
    )
    references = Path(options.references)
    case = case_of(item.name)
    return CaseRun(case, options.device, folder, references, options.trainer, limits).run(progress)


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
        verdict = run_item(item, folder, progress)
    except AssayError as error:
        # A library may contradict its file, which is an error. A planned case has to be possible.
        not_judged = None if item.toml is None else str(error)
        verdict = Verdict(
            verdict=Outcome.FAIL,
            candidate={"case": item.name},
            levels={"run": Level(verdict=Outcome.FAIL, reason=f"could not run: {error}")},
            compared_unit=COMPARED_UNIT,
        )
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
