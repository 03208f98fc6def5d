"""The suite of model expectations: capture and verification."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from assay.models import RECIPES
from assay_expectations.verdict import SHIPPED

pytestmark = pytest.mark.timeout(300)


def run_suite(tmp_path: Path, *options: str, **variables: str) -> tuple[int, str]:
    words = ["--pyargs", "assay_expectations.suites", "-k", "model_", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *words, *options],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "CI"} | variables,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.long
def test_captured_model_is_verified_in_every_test(tmp_path: Path) -> None:
    model, kept = tmp_path / "model", tmp_path / "kept"
    shutil.copytree(RECIPES["bert"].folder, model)
    kept.mkdir()
    asked = ("--expectation-model", str(model), "--expectation-folder", str(kept))

    code, output = run_suite(tmp_path, *asked, "-k", "unfused")
    assert code == 1
    assert f"{kept} has no expectation of {model}" in output

    code, output = run_suite(tmp_path, *asked, "--capture-expectation")
    (file,) = kept.iterdir()
    assert code == 1
    assert f"saved in {file}; run again without --capture-expectation" in output

    code, output = run_suite(tmp_path, *asked)
    assert (code, "4 passed" in output) == (0, True), output

    moved = model.rename(tmp_path / "moved")
    load = ("--expectation-load", str(moved))
    code, output = run_suite(tmp_path, *asked, *load)
    assert (code, "4 passed" in output) == (0, True), output
    code, output = run_suite(tmp_path, *asked[2:], *load)
    assert (code, "--expectation-load needs one --expectation-model" in output) == (1, True), output
    moved.rename(model)

    left = str(shutil.copy(next(SHIPPED.glob("*micro-llama.json")), kept))
    code, output = run_suite(tmp_path, *asked, "-k", "all_used", "-rs")
    words = f"{left} is of micro:llama, which is not tested: add --expectation-model micro:llama"
    assert (code, words in output, "1 skipped" in output) == (0, True, True), output

    code, output = run_suite(tmp_path, *asked[2:], "-k", "all_used")
    words = f"{file} is of {model}, which is not tested: add --expectation-model {model}"
    assert (code, words in output, "delete" in output) == (1, True, False), output


def test_nothing_is_captured_in_ci(tmp_path: Path) -> None:
    asked = ("--capture-expectation", "--expectation-folder", str(tmp_path))
    code, output = run_suite(tmp_path, *asked, CI="true")
    assert code == 4
    assert "--capture-expectation: nothing is captured under CI=true" in output
