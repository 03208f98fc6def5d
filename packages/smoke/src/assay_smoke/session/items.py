"""What a session runs: a case of the matrix, or a training library with a command line."""

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
    """How the cases of a session are run.

    device: as in a RUN; references: the folder of what cases are held to.
    trainer: in place of each framework's own.
    timeout, collective_timeout: of a world of ranks and of one operation over them, in seconds.
    """

    device: str
    references: str
    trainer: str | None = None
    timeout: float
    collective_timeout: float


class SessionItem(Record):
    """Anything that a session runs and judges as one.

    name: of its folder, and in reports.
    command: what to type for it alone.
    num_cards: how many devices it uses; None: as many as it likes.
    toml: the file that describes an external library; options: of a case of the matrix.
    """

    name: str
    command: str
    num_cards: int | None = None
    toml: str | None = None
    options: CaseOptions | None = None


def case_item(case: Case, options: CaseOptions) -> SessionItem:
    """A case of the matrix."""
    words = ["assay", "smoke", "run", case.id, "--device", options.device]
    words += ["--trainer", options.trainer] if options.trainer else []
    return SessionItem(
        name=case.id, command=shlex.join(words), num_cards=case.cards, options=options
    )


def external_item(toml: Path) -> SessionItem:
    """A training library that a file describes.

    Of examples/trl_sft/smoke-lora.toml the name is `trl_sft-lora`, which can be a folder's.
    """
    folder, stem = toml.resolve().parent.name, toml.stem
    return SessionItem(
        name=folder if stem == "smoke" else f"{folder}-{stem.removeprefix('smoke-')}",
        command=f"assay smoke run {COMMAND}{toml}",
        toml=str(toml.resolve()),
    )


def run_item(item: SessionItem, folder: Path, progress: Progress) -> Verdict:
    """Run it, with verdict and logs in `folder`."""
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
