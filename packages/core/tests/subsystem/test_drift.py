"""A golden of another environment, whose model computes another activation: the code changed, and where."""

import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

import assay
from packages.core.tests.subsystem.commands import run_in_process

pytestmark = pytest.mark.long

# What the other environment's library computed: sigmoid(1.02 x).
_OTHER_CODE = """
import torch
own = torch.nn.functional.silu
torch.nn.functional.silu = lambda x, inplace=False: own(1.02 * x) / 1.02
"""


@pytest.fixture(scope="module")
def old_golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old")
    venv.create(folder / "env", symlinks=True)
    (packages,) = (folder / "env/lib").glob("python3*/site-packages")
    paths = sysconfig.get_path("purelib"), Path(assay.__file__).parents[1]
    (packages / "linked.pth").write_text("".join(f"{path}\n" for path in paths), encoding="utf-8")
    (packages / "sitecustomize.py").write_text(_OTHER_CODE, encoding="utf-8")
    metadata = packages / "transformers-5.0.0.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Name: transformers\nVersion: 5.0.0\n", encoding="utf-8")
    words = "capture", "micro:llama", "--run", "cpu/float32", "--noise-for", "bfloat16"
    python, golden = str(folder / "env/bin/python"), str(folder / "golden")
    command = [python, "-m", "assay.cli", *words, "--output", golden]
    subprocess.run(command, check=True, capture_output=True)
    return Path(golden)


def test_the_place_of_changed_code_is_named(tmp_path: Path, old_golden: Path) -> None:
    words = "--golden", old_golden, "--candidate", "cpu/bfloat16"
    found = run_in_process(tmp_path / "run", "check", "generate", "micro:llama", *words)
    assert found.code == 1, found.stderr
    assert found.verdict["location"]["module"].endswith("mlp.act_fn")
    (note,) = [note for note in found.verdict["notes"] if "code changed" in note]
    assert "transformers 5.0.0 -> " in note
    assert "model.layers.0.mlp.act_fn by " in note
    assert "self_attn" not in note
    assert "capture the golden again" in note


def test_a_fault_is_located_in_spite_of_changed_code(tmp_path: Path, old_golden: Path) -> None:
    plant = Path("packages/core/tests/faults/plants/attention.py:scale_2_percent").resolve()
    words = "--golden", old_golden, "--candidate", "cpu/bfloat16", "--candidate-setup", plant
    found = run_in_process(tmp_path / "run", "check", "generate", "micro:llama", *words)
    assert found.verdict["location"]["module"] == "model.layers.1.self_attn"
    assert found.verdict["location"]["op"] == "scaled_dot_product_attention"
    notes = " ".join(found.verdict["notes"])
    assert "fails against a reference of this environment as well" in notes
    assert "besides, the model's code changed" in notes
