"""Write and read the verdict and the measurements in the folder of a run."""

import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from assay.files import (
    DIGEST,
    DiskError,
    UnreadableFileError,
    check_seal,
    file_digest,
    parse_record,
    read_json_object,
    read_record_lines,
    refuse_link,
    require_numbers,
    seal,
    write_whole,
)
from assay.runs.provenance import provenance, redact
from assay.sites import KeptFiles
from assay.verdicts import Measurement, Verdict, find_contradiction

VERDICT_FILE = "verdict.json"
MEASUREMENTS_FILE = "measurements.jsonl"
# Folders in the folder of a run: the reference's recording, the candidate's results.
GOLDEN_FOLDER = "golden"
CANDIDATE_FOLDER = "candidate"
# The checkpoint that a trained candidate resumes from.
CHECKPOINT_FOLDER = "checkpoint"
# The check against a reference of this environment, if it decided and not the golden of another one.
HERE_FOLDER = "here"
# Values of a candidate in float64.
EQUIVALENCE_FOLDER = "equivalence"

_UNSEALED = "{} has no digest: a change of it cannot be seen"


def find_golden(folder: Path) -> Path:
    """Return the golden in the folder of a run, or `folder` itself."""
    inside = folder / GOLDEN_FOLDER
    return inside if inside.is_dir() else folder


def rank_folder(folder: Path, number: int) -> Path:
    """Return the results folder of a rank; `folder`: the candidate's."""
    return folder / f"rank-{number}"


def remove_recordings(folder: Path, keep: KeptFiles) -> None:
    """Remove from the folder of a run what is not kept."""
    if keep == "full":
        return
    here = folder / HERE_FOLDER
    removed = [folder / CHECKPOINT_FOLDER, folder / EQUIVALENCE_FOLDER, here / CANDIDATE_FOLDER]
    if keep == "verdict":
        removed += [folder / GOLDEN_FOLDER, here]
    # Ranks write their logs into the candidate's folder.
    of_candidate = (folder / CANDIDATE_FOLDER).glob("*")
    for path in (*removed, *(one for one in of_candidate if one.suffix != ".log")):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    with suppress(OSError):
        (folder / CANDIDATE_FOLDER).rmdir()


def write_results(
    verdict: Verdict,
    measurements: Iterable[Measurement],
    folder: Path,
    command: Sequence[str] | None = None,
) -> Verdict:
    """Write both files into `folder`, the verdict last: it marks the run as finished.

    command: the command that repeats the run; default: this process's own.
    Returns: the verdict as written, with command and environment, and with a note if the
        measurements could not be written.
    Raises: DiskError, which names the verdict, if the verdict cannot be written.
    """
    lines = (row.model_dump_json() + "\n" for row in measurements)
    try:
        write_whole(folder / MEASUREMENTS_FILE, lines)
    except DiskError as error:
        verdict = _with_note(verdict, f"{error}: tables and pictures are empty")
    return write_verdict(verdict, folder, command)


def write_verdict(verdict: Verdict, folder: Path, command: Sequence[str] | None = None) -> Verdict:
    """Write the verdict as `write_results` does, after the measurements."""
    words = ["assay", *sys.argv[1:]] if command is None else list(command)
    if python := verdict.candidate.get("python"):
        others = f"the reference, unless it is a golden, in {sys.executable}"
        verdict = _with_note(verdict, f"the candidate ran in {python}, and {others}")
    measurements = folder / MEASUREMENTS_FILE
    files = {MEASUREMENTS_FILE: file_digest(measurements)} if measurements.is_file() else {}
    verdict = verdict.model_copy(
        update={"command": redact(words), "environment": provenance(), "files": files}
    )
    try:
        write_whole(folder / VERDICT_FILE, format_verdict(verdict))
    except DiskError as error:
        at = verdict.location
        where = f", at {at.module or at.phase} (step {at.step})" if at is not None else ""
        raise DiskError(f"{error}; the verdict is {verdict.verdict.value}{where}") from error
    return verdict


def format_verdict(verdict: Verdict) -> str:
    """Format the text of verdict.json, with its digest."""
    return seal(json.loads(verdict.to_json()))


def read_verdict(folder: Path) -> Verdict:
    """Read the verdict in `folder`.

    A verdict that assay did not write may lack a digest; a note then says so.
    Raises: UnreadableFileError if the verdict is absent, was changed after assay wrote it, or
        contradicts its levels.
    """
    path = refuse_link(folder / VERDICT_FILE)
    if not path.exists():
        problem = "it is not the folder of a finished run"
        raise UnreadableFileError(f"{folder} holds no {VERDICT_FILE}: {problem}")
    content = read_json_object(path)
    is_sealed = DIGEST in content
    text = json.dumps(check_seal(content, path) if is_sealed else content)
    verdict = parse_record(Verdict, text, path)
    if is_sealed:
        require_numbers(verdict, path)
    if contradiction := find_contradiction(verdict):
        raise UnreadableFileError.of(path, f"it contradicts itself: {contradiction}")
    return verdict if is_sealed else _with_note(verdict, _UNSEALED.format(path.name))


def _with_note(verdict: Verdict, note: str) -> Verdict:
    return verdict.model_copy(update={"notes": [*verdict.notes, note]})


def read_measurements(folder: Path) -> tuple[list[Measurement], list[str]]:
    """Read the measurements in `folder`, and complaints if they are absent or were changed.

    Raises: UnreadableFileError as in `read_verdict`. The verdict has their digest.
    """
    path = refuse_link(folder / MEASUREMENTS_FILE)
    digest = read_verdict(folder).files.get(path.name)
    empty = "tables and pictures that are drawn from it are empty"
    if not path.is_file():
        return [], [f"{path.name} is absent: {empty}"]
    if digest is not None and file_digest(path) != digest:
        return [], [f"{path.name} was changed after the run: {empty}"]
    complaints = [] if digest else [_UNSEALED.format(path.name)]
    rows = list(read_record_lines(Measurement, path))
    for row in rows if digest else ():
        require_numbers(row, path)
    return rows, complaints
