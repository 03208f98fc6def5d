"""The steps of labels.yml, run as on GitHub, with fake `gh`, `jq` and `sleep`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[4]
# Records the addresses and the server, and lists the labels of a file. It refuses to delete or to list if a file
# says so. Prints the states of a merge, one for each question, and records comments.
GH = """#!/bin/sh
here=${0%/*}
echo "$GH_HOST $GH_ENTERPRISE_TOKEN" >"$here/server"
for word in "$@"; do case $word in repos/*) echo "$word" >>"$here/heard";; esac; done
case "$*" in
"pr view"*) head -n 1 "$here/states"; sed -i 1d "$here/states" ;;
"pr comment"*) echo "$*" >>"$here/comments" ;;
*DELETE*) test ! -e "$here/refuses" ;;
*) test ! -e "$here/silent" && cat "$here/labels" ;;
esac
"""
# Prints LABEL as the filter of the step does: not every machine has jq.
JQ = f"""#!{sys.executable}
import os, sys, urllib.parse
assert sys.argv[1:] == ["--null-input", "--raw-output", "$ENV.LABEL | @uri"]
print(urllib.parse.quote(os.environ["LABEL"], safe=""))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("gh", GH), ("jq", JQ), ("sleep", "#!/bin/sh\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def run_job(folder: Path, job: str, **more: str) -> int:
    """Run the step of a job for pull request 5. Returns: its exit code."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/labels.yml").read_text(encoding="utf-8"))
    (step,) = workflow["jobs"][job]["steps"]
    variables = {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "GH_TOKEN": "token",
        "GITHUB_SERVER_URL": "https://git.example", "NUMBER": "5", "REPOSITORY": "o/r", **more,
    }  # fmt: skip
    return subprocess.run(["bash", "-e", "-c", step["run"]], env=variables, check=False).returncode


def withdraw(folder: Path, label: str) -> int:
    return run_job(folder, "withdraw", LABEL=label)


def test_a_label_is_removed_by_its_exact_name(folder: Path) -> None:
    assert withdraw(folder, "smoke:nvidia") == 0
    assert withdraw(folder, "smoke:a/b#2 50%") == 0
    assert (folder / "server").read_text() == "git.example token\n"
    assert (folder / "heard").read_text().split() == [
        "repos/o/r/issues/5/labels/smoke%3Anvidia",
        "repos/o/r/issues/5/labels/smoke%3Aa%2Fb%232%2050%25",
    ]


@pytest.mark.parametrize(
    ("left", "code"), [("", 0), ("smoke:nvidia-4\ntopic\n", 0), ("topic\nsmoke:nvidia\n", 1)]
)
def test_a_refusal_passes_only_if_the_label_is_gone(folder: Path, left: str, code: int) -> None:
    (folder / "refuses").touch()
    (folder / "labels").write_text(left)
    assert withdraw(folder, "smoke:nvidia") == code


def test_a_label_that_github_does_not_list_fails(folder: Path) -> None:
    (folder / "refuses").touch()
    (folder / "silent").touch()
    assert withdraw(folder, "smoke:nvidia") != 0
    assert len((folder / "heard").read_text().split()) == 2  # deletes, then lists


@pytest.mark.parametrize(
    ("states", "asked", "comments"),
    [
        ("MERGEABLE", 1, 0),
        ("CONFLICTING", 1, 1),
        ("UNKNOWN UNKNOWN CONFLICTING", 3, 1),
        ("UNKNOWN UNKNOWN UNKNOWN UNKNOWN", 4, 0),
    ],
)
def test_a_conflict_is_a_comment(folder: Path, states: str, asked: int, comments: int) -> None:
    given = states.split()
    (folder / "states").write_text("\n".join([*given, "MERGEABLE"]) + "\n")
    assert run_job(folder, "conflicts", COMMENT="It conflicts.") == 0
    assert len((folder / "states").read_text().split()) == len(given) + 1 - asked
    file = folder / "comments"
    lines = file.read_text().splitlines() if file.is_file() else []
    assert (
        lines
        == ["pr comment 5 --repo o/r --edit-last --create-if-none --body It conflicts."] * comments
    )
