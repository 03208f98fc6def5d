"""`--candidate-python`: the candidate runs in another environment, here with the same packages."""

import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import assay
from packages.core.tests.subsystem.commands import run_in_process

PLANT = Path("packages/core/tests/faults/plants/attention.py:scale_2_percent").resolve()
SIDES = ("--reference", "cpu/float32", "--candidate", "cpu/bfloat16")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other")
    venv.create(folder, symlinks=True)
    (packages,) = (folder / "lib").glob("python3*/site-packages")
    paths = sysconfig.get_path("purelib"), Path(assay.__file__).parents[1]
    (packages / "linked.pth").write_text("".join(f"{path}\n" for path in paths), encoding="utf-8")
    return folder / "bin/python"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["generate", "train"])
def test_the_candidate_runs_in_the_other_environment(
    tmp_path: Path, python: Path, kind: str
) -> None:
    words = "check", kind, "micro:llama", *SIDES, "--candidate-python", python
    found = run_in_process(tmp_path / "run", *words)
    assert found.code == 0, found.stderr
    assert found.verdict["candidate"]["python"] == str(python)
    assert found.verdict["candidate"]["packages"]["torch"]
    assert "python" not in found.verdict["reference"]


@pytest.mark.parametrize("kind", ["generate", "train"])
def test_this_environment_is_refused(tmp_path: Path, kind: str) -> None:
    words = "check", kind, "micro:llama", *SIDES, "--candidate-python", sys.executable
    found = run_in_process(tmp_path / "run", *words)
    assert found.code == 2
    assert "is the Python that runs assay: both sides would run the same code" in found.stderr


def test_a_fault_there_is_located(tmp_path: Path, python: Path) -> None:
    words = "check", "generate", "micro:llama", *SIDES, "--candidate-python", python
    found = run_in_process(tmp_path / "run", *words, "--candidate-setup", PLANT)
    location = found.verdict["location"]
    assert location["module"] == "model.layers.1.self_attn"
    assert location["op"] == "scaled_dot_product_attention"


@pytest.mark.long
def test_a_matrix_has_a_level_for_each_environment(tmp_path: Path, python: Path) -> None:
    environments = "--matrix", python, "--matrix", "/bin/false"
    words = "check", "generate", "micro:llama", *SIDES, "--level", "logits", *environments
    found = run_in_process(tmp_path / "run", *words)
    assert found.code == 3, found.stderr
    right, broken = found.verdict["levels"].items()
    assert (right[1]["verdict"], broken[1]["verdict"]) == ("PASS", "NOT_COMPARED")
    assert right[0].startswith(f"{python.parents[1].name}: torch ")
    assert "does not work" in broken[1]["reason"]
    assert found.verdict["headline"] == "1 of 2 environments agree with the golden."
    assert (tmp_path / "run" / python.parents[1].name / "verdict.json").is_file()
