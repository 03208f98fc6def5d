"""The steps of the action `check`, run as on GitHub, without installing assay."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[4]
ACTION = ROOT / ".github/actions/check/action.yml"


def run_action(folder: Path, **given: str) -> tuple[list[int], str]:
    """Run each step whose `if` holds. Returns: their exit codes, and the job's summary."""
    action: dict[str, Any] = YAML(typ="safe").load(ACTION.read_text(encoding="utf-8"))
    unknown = set(given) - set(action["inputs"])
    assert unknown == set()
    inputs = {
        name: given.get(name, one.get("default", "")) for name, one in action["inputs"].items()
    }
    summary = folder / "summary.md"
    codes: list[int] = []
    install, *steps = action["runs"]["steps"]
    assert "pip install" in install["run"]
    for step in steps:
        if not holds(step.get("if", "success()"), inputs, failed=any(codes)):
            continue
        env = {
            name: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda found: inputs[found[1]], value)
            for name, value in step["env"].items()
        }
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=folder, check=False,
            env={**os.environ, **env, "PATH": path, "GITHUB_STEP_SUMMARY": str(summary)},
        )  # fmt: skip
        codes.append(done.returncode)
    return codes, summary.read_text(encoding="utf-8") if summary.is_file() else ""


def holds(condition: str, inputs: dict[str, str], *, failed: bool) -> bool:
    if condition == "always()":
        return True
    found = re.fullmatch(r"inputs\.(\w+) ([!=])= ''", condition)
    assert found or condition == "success()", condition
    wanted = True if found is None else (inputs[found[1]] == "") == (found[2] == "=")
    return wanted and not failed


@pytest.mark.long
def test_a_model_is_checked_and_the_summary_says_so(tmp_path: Path) -> None:
    model = "micro:llama"
    codes, summary = run_action(tmp_path, model=model, run="sim/bfloat16", output="runs/assay")
    assert codes == [0, 0]
    verdict = json.loads((tmp_path / "runs/assay/verdict.json").read_text(encoding="utf-8"))
    assert (verdict["verdict"], verdict["candidate"]["run"]) == ("PASS", "sim/bfloat16")
    assert "PASS" in summary.splitlines()[0]


def test_an_invalid_golden_fails_every_step(tmp_path: Path) -> None:
    codes, _ = run_action(tmp_path, model="$(touch planted)", run="cpu/bfloat16", golden="absent")
    assert codes == [2, 2]
    assert not (tmp_path / "planted").exists()
