"""The example that opens docs/architecture.md."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


def test_toy_replay_finds_the_fault_in_its_layer_alone(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples/toy_replay.py"))

    lines = capsys.readouterr().out.splitlines()
    errors = {path: float(error) for path, error in (line.split(": ") for line in lines)}
    assert errors.keys() == {"0", "1", "2", "3"}
    assert errors.pop("1") == pytest.approx(0.02)
    assert max(errors.values()) < 1e-6
