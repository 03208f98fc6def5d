import errno
import json
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from assay.errors import MachineError, UsageError
from assay.files import DiskError
from assay.runs import FolderError, RunFolder, removed_if_refused


def test_default_folder_names_time_and_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = RunFolder.create("check generate")
    assert re.fullmatch(r"runs/\d{8}-\d{6}-check-generate", str(first.path))
    assert json.loads((first.path / "run.json").read_text())["run"] == "check generate"


def test_runs_of_the_same_second_get_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folders = {RunFolder.create("compare").path for _ in range(5)}
    assert len(folders) == 5


@pytest.mark.parametrize("existing", [False, True])
def test_new_or_empty_folder_is_taken(tmp_path: Path, existing: bool) -> None:
    folder = tmp_path / "a/b"
    if existing:
        folder.mkdir(parents=True)
    assert RunFolder.create("compare", folder).path == folder


def test_folder_that_holds_anything_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(UsageError, match=r"is not empty \(it holds notes.txt\).*--output"):
        RunFolder.create("compare", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    RunFolder.create("compare", tmp_path / "run").write_text("verdict.json", "{}")
    with pytest.raises(FolderError, match=r"is not empty \(it holds another run\)"):
        RunFolder.create("compare", tmp_path / "run")


def test_one_of_two_runs_gets_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Barrier(6)
    won: list[RunFolder] = []
    lost: list[FolderError] = []

    def create() -> None:
        start.wait()
        try:
            won.append(RunFolder.create("compare", tmp_path / "run"))
        except FolderError as error:
            lost.append(error)

    # All look before the first writes.
    monkeypatch.setattr(os, "listdir", lambda _: [])
    threads = [threading.Thread(target=create) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(won) == 1
    assert len(lost) == 5
    assert str(lost[0]).endswith("is in use by another run: name a new folder with --output")


def test_folder_below_a_file_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match=r"cannot write .*file/run: Not a directory"):
        RunFolder.create("compare", tmp_path / "file/run")


def test_read_only_folder_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The superuser, whom containers run tests as, may write anywhere: so the refusal is planted.
    real_open = Path.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name != "run.json":
            return real_open(path, *arguments, **options)
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DiskError, match=r"cannot write .*run\.json: Read-only file system"):
        RunFolder.create("compare", tmp_path / "run")


def test_files_appear_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.create("compare", tmp_path / "run")
    assert folder.write_text("verdict.json", "whole").read_text() == "whole"

    def refuse(_path: Path, _target: Path) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(DiskError, match=r"cannot write .*verdict\.json: No space left on device"):
        folder.write_text("verdict.json", "other")
    assert (folder.path / "verdict.json").read_text() == "whole"
    assert sorted(file.name for file in folder.path.iterdir()) == ["run.json", "verdict.json"]


def test_folder_of_a_run_without_a_result_says_so(tmp_path: Path) -> None:
    RunFolder.create("compare", tmp_path / "run")
    with pytest.raises(FolderError) as caught:
        RunFolder.create("compare", tmp_path / "run")
    assert (
        "holds a run without a result: it was refused or interrupted, or is still running"
        in str(caught.value)
    )
    assert "rm -r" not in str(caught.value)


@pytest.mark.parametrize("file", ["session.json", "cases/one/verdict.json"])
def test_a_session_whose_verdicts_are_in_its_parts_is_finished(tmp_path: Path, file: str) -> None:
    folder = RunFolder.create("smoke run", tmp_path / "run").path
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text("{}")
    with pytest.raises(FolderError, match="it holds another run"):
        RunFolder.create("smoke run", folder)


@removed_if_refused()
def refuse(folder: Path, name: str = "reference.log", problem: str = "no such dump") -> None:
    RunFolder.create("compare", folder).write_text(name, "")
    raise UsageError(problem)


@pytest.mark.parametrize("existing", [False, True])
def test_a_refused_run_leaves_nothing(tmp_path: Path, existing: bool) -> None:
    folder = tmp_path / "run"
    if existing:
        folder.mkdir()
    with pytest.raises(UsageError, match="no such dump"):
        refuse(folder)
    assert folder.exists() == existing
    assert RunFolder.create("compare", folder).path == folder


@pytest.mark.parametrize("kept", ["verdict.json", "golden.json"])
def test_a_run_that_is_refused_after_work_keeps_its_files(tmp_path: Path, kept: str) -> None:
    with pytest.raises(UsageError, match="no such dump"):
        refuse(tmp_path / "run", kept)
    assert {file.name for file in (tmp_path / "run").iterdir()} == {"run.json", kept}


def test_a_folder_that_the_refusal_names_is_kept(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="see"):
        refuse(tmp_path / "run", problem=f"see {tmp_path / 'run'}/reference.log")
    assert (tmp_path / "run/reference.log").exists()


def test_a_run_goes_on_in_the_folder_of_its_own_command_alone(tmp_path: Path) -> None:
    folder = RunFolder.create("bench run", tmp_path / "run").path  # which nobody holds any more
    (folder / "kept").write_text("work")

    assert RunFolder.resume("bench run", folder).path == folder
    assert sorted(path.name for path in folder.iterdir()) == ["kept", "run.json"]
    with pytest.raises(FolderError):
        RunFolder.resume("bench tune", folder)
    assert RunFolder.resume("bench run", tmp_path / "new").path == tmp_path / "new"


def test_two_runs_never_share_a_folder(tmp_path: Path) -> None:
    first = RunFolder.create("bench run", tmp_path / "run")
    with pytest.raises(FolderError, match=r"is in use by another run: name a new folder"):
        RunFolder.resume("bench run", first.path)
    del first
    assert RunFolder.resume("bench run", tmp_path / "run").path == tmp_path / "run"


@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to("/dev/full")])
def test_what_is_no_folder_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "x")
    with pytest.raises(FolderError, match=r"x is not a folder: name another one with --output"):
        RunFolder.create("compare", tmp_path / "x")
