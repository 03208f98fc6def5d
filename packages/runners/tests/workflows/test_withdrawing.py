"""The step of labels.yml, run as on GitHub, with fake `gh` and `jq`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[4]
# Records the addresses, and lists the labels of a file. It refuses to delete or to list if a file says so.
GH = """#!/bin/sh
here=${0%/*}
for word in "$@"; do case $word in repos/*) echo "$word" >>"$here/heard";; esac; done
case "$*" in
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
    for name, text in (("gh", GH), ("jq", JQ)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def withdraw(folder: Path, label: str) -> int:
    """Run the step for `label` of pull request 5. Returns: its exit code."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/labels.yml").read_text(encoding="utf-8"))
    (step,) = workflow["jobs"]["withdraw"]["steps"]
    variables = {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "LABEL": label, "NUMBER": "5", "REPOSITORY": "o/r",
    }  # fmt: skip
    return subprocess.run(["bash", "-e", "-c", step["run"]], env=variables, check=False).returncode


def test_a_label_is_removed_by_its_exact_name(folder: Path) -> None:
    assert withdraw(folder, "smoke:nvidia") == 0
    assert withdraw(folder, "smoke:a/b#2 50%") == 0
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
