"""The pull request of a recapture, with real expectations and a real repository."""

import os
import subprocess
from pathlib import Path

import pytest

from assay.errors import UsageError
from assay_runners.upkeep import SHIPPED, gather, open_pull_request

ROOT = Path(__file__).resolve().parents[4]
EXPECTATION = ROOT / SHIPPED / "cpu-x86_64-bfloat16-micro-llama.json"


@pytest.fixture(autouse=True)
def _runs_are_left_in_a_folder_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def put(file: Path) -> None:
    """Copy an expectation to the path of a captured one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(EXPECTATION.read_bytes())


@pytest.mark.long
def test_a_proposal_lists_captured_files_and_the_reason_on_one_line(tmp_path: Path) -> None:
    for artifact, name in (("expectations-a-1", "a.json"), ("expectations-b-1", "b.json")):
        put(tmp_path / artifact / "captured" / name)
    put(tmp_path / "expectations-a-1" / "20260101-check" / "verdict.json")
    put(tmp_path / "root" / SHIPPED / "b.json")
    proposal = gather(tmp_path, tmp_path / "root", "torch 2.13\n`rm -rf`")
    assert proposal.title == "expectations: recapture 2 files"
    assert proposal.body.startswith("Recaptured: `torch 2.13 'rm -rf'`\n")
    assert "### a.json\n\nNew: this is the first capture on such a machine." in proposal.body
    assert "### b.json\n\n" in proposal.body
    assert "micro:llama" in proposal.body.partition("### b.json")[2]
    assert [target.name for target in proposal.files.values()] == ["a.json", "b.json"]


@pytest.mark.long
def test_the_newest_attempt_of_a_machine_counts(tmp_path: Path) -> None:
    for artifact in ("expectations-a-4-2", "expectations-a-4-10", "expectations-a-1"):
        put(tmp_path / artifact / "captured" / f"{artifact}.json")
    names = {file.name for file in gather(tmp_path, tmp_path / "root", "x").files}
    assert names == {"expectations-a-4-10.json", "expectations-a-1.json"}


def test_a_new_file_that_is_not_an_expectation_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "expectations-a-1" / "captured" / "a.json"
    put(file)
    file.write_text("{}")
    with pytest.raises(UsageError, match=r"^a\.json: "):
        gather(tmp_path, tmp_path / "root", "x")


def test_an_empty_capture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no machine captured anything"):
        gather(tmp_path, tmp_path, "x")


def test_two_captures_of_one_name_are_refused(tmp_path: Path) -> None:
    for artifact in ("a", "b"):
        (tmp_path / artifact / "captured").mkdir(parents=True)
        (tmp_path / artifact / "captured" / "same.json").write_text("{}")
    with pytest.raises(UsageError, match=r"same\.json was captured twice"):
        gather(tmp_path, tmp_path, "x")


@pytest.fixture
def heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Record each call of `gh`, which does nothing."""
    program, file = tmp_path / "programs" / "gh", tmp_path / "heard"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$*" >> "{file}"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return file


def git(*words: object) -> None:
    who = ("-c", "user.name=x", "-c", "user.email=x@localhost")
    subprocess.run(["git", *who, *map(str, words)], check=True, capture_output=True)


def test_a_proposal_is_pushed_to_its_own_branch(
    tmp_path: Path, heard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    origin, root = tmp_path / "origin", tmp_path / "root"
    put(tmp_path / "captured" / "a-1" / "captured" / "new.json")
    git("init", "-q", "--bare", "-b", "main", origin)
    git("clone", "-q", origin, root)
    (root / SHIPPED).mkdir(parents=True)
    (root / SHIPPED / "old.json").touch()
    for words in (("checkout", "-q", "-b", "main"), ("add", "."), ("commit", "-qm", "first")):
        git("-C", root, *words)
    git("-C", root, "push", "-q", "origin", "main")
    before = (origin / "refs/heads/main").read_text()
    run = {"GITHUB_RUN_ID": "5", "GITHUB_RUN_ATTEMPT": "2"}
    open_pull_request(gather(tmp_path / "captured", root, "x"), root, "main", run)
    assert (origin / "refs/heads/main").read_text() == before
    assert [path.name for path in (origin / "refs/heads/recapture").iterdir()] == ["5-2"]
    expected = (
        "\npr create --base main --head recapture/5-2 --title expectations: recapture 1 file --body"
    )
    assert expected in heard.read_text()
