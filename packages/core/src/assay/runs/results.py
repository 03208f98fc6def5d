"""What lies in the folder of a finished run: verdict and measurements, written and read."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from assay.errors import UsageError
from assay.runs.errors import DiskError
from assay.runs.folders import write_whole
from assay.runs.provenance import provenance
from assay.verdicts import Measurement, Verdict

VERDICT_FILE = "verdict.json"
MEASUREMENTS_FILE = "measurements.jsonl"
# Beside both: what the reference recorded, and what the candidate measured against it.
GOLDEN_FOLDER = "golden"
CANDIDATE_FOLDER = "candidate"


def rank_folder(folder: Path, number: int) -> Path:
    """Where a rank of several writes what it measured; `folder`: the candidate's."""
    return folder / f"rank-{number}"


class UnreadableRunError(UsageError):
    """A folder does not hold the files of a finished run."""

    @classmethod
    def absent(cls, folder: Path) -> Self:
        """There is no verdict in `folder`."""
        return cls(f"{folder} holds no {VERDICT_FILE}: it is not the folder of a finished run")

    @classmethod
    def damaged(cls, path: Path, line: int | None, cause: ValidationError) -> Self:
        """`path` does not follow the schema."""
        where = f"{path}, line {line}" if line else str(path)
        first = cause.errors()[0]
        field_path = ".".join(map(str, first["loc"]))
        why = f"{field_path}: {first['msg']}".removeprefix(": ")
        return cls(f"{where} cannot be read: {why}")


def write_results(
    verdict: Verdict,
    measurements: Iterable[Measurement],
    folder: Path,
    command: Sequence[str] | None = None,
) -> Verdict:
    """Write both files into `folder`, the verdict last: where it lies, the run is finished.

    command: what to type for the same run; None: what this process was started by.
    Returns: the verdict as written, with the command and the environment, and with a note where
        there was no room for the measurements.
    Raises: DiskError, which tells the verdict, if it cannot be written.
    """
    text = "".join(row.model_dump_json() + "\n" for row in measurements)
    try:
        write_whole(folder / MEASUREMENTS_FILE, text)
    except DiskError as error:
        notes = [*verdict.notes, f"{error}: tables and pictures are empty"]
        verdict = verdict.model_copy(update={"notes": notes})
    return write_verdict(verdict, folder, command)


def write_verdict(verdict: Verdict, folder: Path, command: Sequence[str] | None = None) -> Verdict:
    """As `write_results`, where the measurements are written already."""
    words = ["assay", *sys.argv[1:]] if command is None else list(command)
    verdict = verdict.model_copy(update={"command": words, "environment": provenance()})
    try:
        write_whole(folder / VERDICT_FILE, verdict.to_json())
    except DiskError as error:
        at = verdict.location
        where = f", at {at.module or at.phase} (step {at.step})" if at is not None else ""
        raise DiskError(f"{error}; the verdict is {verdict.verdict.value}{where}") from error
    return verdict


def read_verdict(folder: Path) -> Verdict:
    """The verdict in `folder`.

    Raises: UnreadableRunError if there is none, or it does not follow the schema.
    """
    path = folder / VERDICT_FILE
    try:
        return Verdict.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise UnreadableRunError.absent(folder) from None
    except ValidationError as error:
        raise UnreadableRunError.damaged(path, None, error) from None


def read_measurements(folder: Path) -> tuple[list[Measurement], list[str]]:
    """The measurements in `folder`, and complaints where the last was cut short, or all are absent.

    Raises: UnreadableRunError if a line does not follow the schema.
    """
    path = folder / MEASUREMENTS_FILE
    if not path.is_file():
        return [], [f"{path.name} is absent: tables and pictures that are drawn from it are empty"]
    rows: list[Measurement] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                rows.append(Measurement.model_validate_json(line))
            except ValidationError as error:
                if not line.endswith(b"\n"):
                    return rows, [f"{path.name} was cut short after {len(rows):,} measurements"]
                raise UnreadableRunError.damaged(path, number, error) from None
    return rows, []
