"""The files of a finished run, and what is removed of it; how damaged ones are read is tested with the report."""

import errno
import sys
from pathlib import Path

import pytest

from assay.files import DiskError, UnreadableFileError, write_whole
from assay.runs import results
from assay.runs.results import (
    find_golden,
    read_measurements,
    read_verdict,
    remove_recordings,
    write_results,
)
from assay.sites import KeptFiles
from assay.verdicts import Location, Measurement, Outcome, Verdict

ROW = Measurement(
    level="loss", module="", port="loss", statistic="loss-error", actual=float("inf"), expected=1.0,
    ratio=float("inf"),
)  # fmt: skip


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    written = write_results(Verdict(verdict=Outcome.FAIL), [ROW, ROW], tmp_path)
    assert read_verdict(tmp_path) == written
    assert read_measurements(tmp_path) == ([ROW, ROW], [])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "measurements.jsonl", "verdict.json",
    ]  # fmt: skip


def test_verdict_carries_the_command_and_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/assay", "check", "train"])
    written = write_results(Verdict(verdict=Outcome.PASS), [], tmp_path)
    assert written.command == ["assay", "check", "train"]
    assert written.environment["versions"]["torch"] is not None


def test_python_of_each_side_is_named(tmp_path: Path) -> None:
    verdict = Verdict(verdict=Outcome.FAIL, candidate={"python": "/new/bin/python"})
    assert write_results(verdict, [], tmp_path).notes == [
        f"the candidate ran in /new/bin/python, and the reference, unless it is a golden, in {sys.executable}"
    ]


def test_folder_without_a_verdict_is_no_finished_run(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFileError, match=r"holds no verdict\.json"):
        read_verdict(tmp_path)


def test_verdict_is_written_where_there_is_no_room_for_measurements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, text: str) -> Path:
        if path.name == "measurements.jsonl":
            raise DiskError.refused(path, OSError(errno.ENOSPC, "No space left on device"))
        return write_whole(path, text)

    monkeypatch.setattr(results, "write_whole", refuse)
    written = write_results(Verdict(verdict=Outcome.FAIL), [ROW], tmp_path)
    assert read_verdict(tmp_path) == written
    (note,) = written.notes
    assert note == (
        f"cannot write {tmp_path / 'measurements.jsonl'}: No space left on device:"
        " tables and pictures are empty"
    )


def test_verdict_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, _text: str) -> Path:
        raise DiskError.refused(path, OSError(errno.ENOSPC, "No space left on device"))

    monkeypatch.setattr(results, "write_whole", refuse)
    location = Location(phase="forward", step=0, rank=0, module="model.norm")
    with pytest.raises(DiskError, match=r"; the verdict is FAIL, at model\.norm \(step 0\)$"):
        write_results(Verdict(verdict=Outcome.FAIL, location=location), [], tmp_path)


def test_the_file_is_a_verdict_for_other_programs(tmp_path: Path) -> None:
    written = write_results(Verdict(verdict=Outcome.FAIL), [ROW], tmp_path)
    read = Verdict.model_validate_json((tmp_path / "verdict.json").read_text())
    assert read.digest
    assert read.model_copy(update={"digest": None}) == written


def test_golden_is_found_in_the_folder_of_a_run(tmp_path: Path) -> None:
    assert find_golden(tmp_path) == tmp_path
    (tmp_path / "golden").mkdir()
    assert find_golden(tmp_path) == tmp_path / "golden"


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ("full", {"golden/a", "candidate/rank-0/b", "candidate/rank0.log", "checkpoint/c"}),
        ("replay", {"golden/a", "candidate/rank0.log"}),
        ("verdict", {"candidate/rank0.log"}),
    ],
)  # fmt: skip
def test_what_is_not_kept_is_removed_and_logs_stay(
    tmp_path: Path, keep: KeptFiles, kept: set[str]
) -> None:
    for name in (
        "golden/a",
        "candidate/rank-0/b",
        "candidate/rank0.log",
        "checkpoint/c",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "verdict.json").touch()

    remove_recordings(tmp_path, keep)

    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == kept | {"verdict.json"}


def test_candidate_without_logs_is_removed_whole(tmp_path: Path) -> None:
    (tmp_path / "candidate" / "attachments").mkdir(parents=True)
    (tmp_path / "candidate" / "index.jsonl").touch()

    remove_recordings(tmp_path, "replay")

    assert list(tmp_path.iterdir()) == []
