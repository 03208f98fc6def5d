"""The items of a session: cases of the matrix, and training libraries with a command line."""

import shlex
from pathlib import Path

from assay.launch import TimeLimits
from assay.runs import Progress
from assay.verdicts import Record, Verdict
from assay_smoke.cases.running import CaseRun, References
from assay_smoke.external.cycle import run_external
from assay_smoke.matrix.cases import Case, case_of

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
    references = References(Path(options.references))
    case = case_of(item.name)
    return CaseRun(case, options.device, folder, references, options.trainer, limits).run(progress)
