"""What large models get in place of a yardstick in float64."""

from pathlib import Path

import pytest

from assay.devices.run_string import parse_run
from assay.generate import capture
from assay.generate.spec import GoldenSpec, InputOptions
from assay.runs import SilentProgress
from packages.core.tests.subsystem.generate.conftest import MODEL, RunAssay

pytestmark = pytest.mark.long


@pytest.fixture
def golden_in_float32(prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A golden whose yardstick computes in float32."""
    monkeypatch.setattr(capture, "yardstick_dtype", lambda *_: "float32")
    folder = tmp_path / "golden"
    spec = GoldenSpec(
        model=MODEL,
        reference=parse_run("cpu/float32"),
        noise_for=["bfloat16"],
        inputs=InputOptions(prompts=str(prompts), max_new_tokens=8),
        folder=folder,
    )
    manifest = capture.capture_golden(spec, SilentProgress())
    assert manifest.sections["bfloat16"].yardstick_dtype == "float32"
    return folder


def test_yardstick_in_float32_passes_a_healthy_candidate_and_finds_a_fault(
    golden_in_float32: Path, assay: RunAssay, setups: Path
) -> None:
    command = "check", "generate", MODEL, "--golden", golden_in_float32
    clean = assay(*command, "--candidate", "sim/bfloat16")
    planted = assay(
        *command, "--candidate", "sim/bfloat16", "--candidate-setup", f"{setups}:outputs_1001"
    )

    assert clean.code == 0, clean.stdout
    assert planted.code == 1
    assert planted.verdict["location"]["module"] == "model.layers.1.mlp.down_proj"
