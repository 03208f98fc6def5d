"""The files of a comparison of two evaluations."""

import json
from importlib.resources import files
from pathlib import Path

import pytest

from assay_bench.comparing.terms import Terms
from assay_bench.comparison_files import compare_folders

SHIPPED = Path(str(files("assay_bench"))) / "baselines" / "shipped"


@pytest.mark.parametrize(("candidate", "judged"), [("full", "PASS"), ("lora", "FAIL")])
def test_a_comparison_leaves_its_verdict_as_json_and_as_text(
    candidate: str, judged: str, tmp_path: Path
) -> None:
    base, other = (SHIPPED / f"micro-llama-{name}.json" for name in ("full", candidate))
    compare_folders(base, other, Terms(), {}, tmp_path)
    found = json.loads((tmp_path / "comparison.json").read_text())
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert found["judged"] == judged
    assert verdict["verdict"] == judged
    assert judged in (tmp_path / "comparison.md").read_text()
