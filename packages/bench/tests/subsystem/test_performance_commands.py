"""The commands `assay bench perf` and `ab`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from assay.files import read_sealed
from assay.models.micro.recipes import find_recipe
from assay_bench.performance.records import RESULT_FILE, PerformanceResult

pytestmark = pytest.mark.timeout(600)

# `assay bench perf` without torch, for environments in which only `decode` differs.
LIGHT_PERF = """
import sys, time
from pathlib import Path
from assay_bench.performance.records import PerformanceResult, SuiteResult

words = sys.argv[1:]
results = []
for suite in [words[at + 1] for at, word in enumerate(words) if word == "--suite"]:
    times = []
    for _ in range(100):
        begun = time.perf_counter()
        time.sleep(SECONDS if suite == "decode" else 0.004)
        times.append(time.perf_counter() - begun)
    controls = [1.0] * len(times)
    results.append(SuiteResult(
        suite=suite, seconds=times, matmul_seconds=controls, matmul_flops=1, read_seconds=controls,
        read_bytes=1,
    ))
output = Path(words[-1])
output.mkdir()
found = PerformanceResult(machine="this", run="cpu/float32", model="micro:llama", suites=results)
(output / "performance.json").write_text(found.to_json())
"""

LIGHT_PYTHON = """#!/bin/sh
exec "{python}" "{perf}" "$@"
"""

# A planted slow-down: every linear layer computes its product ten times.
# Other work on the machine can change a ratio by half, far less than this.
SLOW_LINEAR = """
import importlib.abc, importlib.machinery, sys

class Slower(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch.nn.modules.linear":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            forward = module.Linear.forward
            def ten_times(self, x):
                for _ in range(9):
                    forward(self, x)
                return forward(self, x)
            module.Linear.forward = ten_times
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Slower())
"""


def assay(
    *arguments: object, variables: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "assay.cli", "bench", *map(str, arguments)]
    environment = {**os.environ, **(variables or {})}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd=cwd
    )


def printed(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def make_environment(folder: Path, seconds: float) -> Path:
    """Make an environment with this one's packages and light suites. `decode` takes `seconds`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    paths = [path for path in sys.path if path]
    (packages / "a_paths.pth").write_text(f"import sys; sys.path[:0] = {paths!r}\n")
    perf, python = folder / "light_perf.py", folder / "bin" / "python"
    perf.write_text(LIGHT_PERF.replace("SECONDS", f"{seconds}"))
    real = python.rename(folder / "bin" / "real-python")
    python.write_text(LIGHT_PYTHON.format(python=real, perf=perf))
    python.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("environments")
    return {
        "clean": make_environment(folder / "clean", 0.004),
        "slow": make_environment(folder / "slow", 0.006),
    }


@pytest.mark.long
@pytest.mark.parametrize(
    ("side", "suites", "code", "verdict", "outcomes"),
    [
        ("clean", ["decode"], 0, "PASS", {"decode": "PASS"}),
        ("slow", ["prefill", "decode"], 1, "FAIL", {"prefill": "PASS", "decode": "FAIL"}),
    ],
)
def test_ab_names_the_slower_suite(
    environments: dict[str, Path],
    tmp_path: Path,
    side: str,
    suites: list[str],
    code: int,
    verdict: str,
    outcomes: dict[str, str],
) -> None:
    chosen = [word for name in suites for word in ("--suite", name)]
    done = assay(
        "ab", environments["clean"], environments[side], *chosen, "--blocks", 6, "--margin", 0.2,
        "--output", tmp_path / "run", "--json",
    )  # fmt: skip
    found = printed(done)
    assert (done.returncode, found["verdict"]) == (code, verdict), done.stderr
    assert {name: level["verdict"] for name, level in found["levels"].items()} == outcomes
    assert found["compared"] == 6 * len(suites)
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.long
def test_model_is_found_by_a_relative_path(tmp_path: Path) -> None:
    folder = find_recipe("llama").folder
    (tmp_path / "model").symlink_to(folder)
    done = assay("perf", "--suite", "prefill", "--model", "model", "--output", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "performance.json").is_file()


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two runs of shipped suites: clean, and with a planted slow-down."""
    folder = tmp_path_factory.mktemp("perf")
    (folder / "plant").mkdir()
    (folder / "plant" / "sitecustomize.py").write_text(SLOW_LINEAR)
    paths = os.pathsep.join([str(folder / "plant"), os.environ.get("PYTHONPATH", "")])
    for name, variables in (("clean", {}), ("planted", {"PYTHONPATH": paths})):
        chosen = ("--suite", "prefill", "--suite", "compare", "--output", folder / name)
        done = assay("perf", *chosen, "--json", variables=variables)
        assert done.returncode == 0, done.stderr
        assert printed(done) == json.loads((folder / name / "performance.json").read_text())
    return {"clean": folder / "clean", "planted": folder / "planted"}


def read_performance(folder: Path) -> PerformanceResult:
    return read_sealed(PerformanceResult, folder / RESULT_FILE)


@pytest.mark.long
def test_perf_stores_every_round_with_its_controls(measured: dict[str, Path]) -> None:
    result = read_performance(measured["clean"])
    assert [suite.suite for suite in result.suites] == ["prefill", "compare"]
    prefill = result.suites[0]
    assert len(prefill.seconds) == len(prefill.matmul_seconds) == len(prefill.read_seconds) >= 20
    assert prefill.num_tokens == 256
    # At least two operations per parameter and token, and not faster than a matrix product
    # alone.
    assert prefill.num_flops > 2 * 256 * 300_000
    assert 0 < prefill.flops_share < 1
    assert prefill.peak_memory_bytes > 0
    assert result.provenance["versions"]["torch"] == result.versions["torch"]


@pytest.mark.long
def test_planted_slow_down_shows_in_its_suite(measured: dict[str, Path]) -> None:
    clean, planted = (
        {suite.suite: suite.ratio for suite in read_performance(measured[name]).suites}
        for name in ("clean", "planted")
    )
    growth = {suite: planted[suite] / clean[suite] for suite in clean}
    assert growth["prefill"] > 1.5 * growth["compare"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["perf", "--suite", "prefil"], "unknown suite 'prefil'; did you mean prefill?"),
        (["perf", "--run", "cpu"], "'cpu' is not a run; write one as DEVICE/DTYPE"),
        (["perf", "--model", "micro:lama"], "unknown recipe 'lama'"),
        (
            ["ab", "absent", "absent"],
            "absent is neither a folder with bin/python, a Python executable, nor a folder with",
        ),
        # Found before the environments are asked for their suites.
        (
            ["ab", sys.executable, sys.executable, "--model", "./absent"],
            "model './absent': no such",
        ),
        (["ab", sys.executable, sys.executable, "--blocks", "5"], "5 blocks are too few"),
    ],
)
def test_usage_error_exits_with_2_and_one_message(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = assay(*arguments, "--output", tmp_path / "run")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith(f"assay: {message}")
    assert not (tmp_path / "run").exists()


def test_planning_imports_no_torch() -> None:
    code = (
        "import sys; from assay_bench.commands import app;"
        " from assay_bench import run_tasks;"
        " from assay_bench.performance import running;"
        " sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
