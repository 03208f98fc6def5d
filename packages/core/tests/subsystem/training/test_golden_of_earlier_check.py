"""`assay check train --golden`: a candidate against the golden of an earlier check."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaModel

from assay.files import read_sealed, write_sealed
from assay.runs import SilentProgress
from assay.training.check import REPORT_FILE
from assay.training.processes.reference import find_code_changes
from assay.training.reports import ReferenceReport, TrainCheck, TrainOptions
from packages.core.tests.faults.training_corpus import PLANTS
from packages.core.tests.subsystem.commands import Finished, run_in_process
from packages.core.tests.subsystem.training.conftest import MODEL


@pytest.fixture
def golden(goldens: Callable[..., Path]) -> Path:
    return goldens("float32", TrainOptions(model=MODEL))


def check(golden: Path, folder: Path, *arguments: str, candidate: str = "cpu/float32") -> Finished:
    words = "--candidate", candidate, *arguments
    return run_in_process(folder, "check", "train", MODEL, "--golden", golden, *words)


def with_older_torch(golden: Path, old: Path) -> tuple[Path, str]:
    """Copy a golden as if an older torch had recorded it. Returns: the copy, and the version of torch here."""
    shutil.copytree(golden, old)
    report = read_sealed(ReferenceReport, old / REPORT_FILE)
    assert report.plan is not None
    versions = report.plan.environment["versions"]
    environment = report.plan.environment | {"versions": versions | {"torch": "2.0.0"}}
    plan = report.plan.model_copy(update={"environment": environment})
    write_sealed(old / REPORT_FILE, report.model_copy(update={"plan": plan}))
    return old, versions["torch"]


@pytest.mark.parametrize(
    ("trainer", "code", "diagnosis"),
    [
        pytest.param("reference", 0, None, marks=pytest.mark.long),
        (f"{PLANTS / 'trainers.py'}:MeanOfMeans", 1, "loss-scale"),
    ],
)
def test_candidate_is_judged_by_a_golden_of_other_packages(
    golden: Path, tmp_path: Path, trainer: str, code: int, diagnosis: str | None
) -> None:
    old, now = with_older_torch(golden, tmp_path / "old")

    run = check(old, tmp_path / "run", "--candidate-trainer", trainer, "--keep", "verdict")
    assert (run.code, run.verdict["diagnosis"]) == (code, diagnosis), run.stderr
    assert run.verdict["reference"]["run"] == "cpu/float32"
    assert f"recorded with other packages: torch 2.0.0 -> {now}" in run.stdout
    assert ("computes the golden's exact values here" in run.stdout) == bool(code)
    assert (old / REPORT_FILE).is_file()
    assert not (tmp_path / "run" / "golden").exists()


@pytest.mark.parametrize(
    ("arguments", "candidate", "message"),
    [
        (["--steps", "4"], "cpu/float32", "another plan: steps 3, here 4. Leave these options out"),
        (["--lora"], "cpu/float32", "lora False, here True"),
        (["--mixed-precision"], "cpu/float32", "mixed_precision False, here True"),
        ([], "cpu/bfloat16", "recorded for candidates in float32, not bfloat16"),
        (["--reference", "cpu/float32"], "cpu/float32", "either --reference RUN or --golden"),
        (["--overfit"], "cpu/float32", "--golden with --overfit"),
    ],
)
def test_another_plan_is_refused(
    golden: Path, tmp_path: Path, arguments: list[str], candidate: str, message: str
) -> None:
    run = check(golden, tmp_path / "run", *arguments, candidate=candidate)
    assert run.code == 2
    assert message in run.stderr


def test_a_folder_without_golden_is_refused(tmp_path: Path) -> None:
    assert "holds no golden of `assay check train`" in check(tmp_path, tmp_path / "run").stderr


@pytest.mark.parametrize(("factor", "stages"), [(1.0, set()), (1.001, {"model.norm"})])
def test_a_golden_is_replayed_here_and_changed_code_is_named(
    golden: Path, monkeypatch: pytest.MonkeyPatch, factor: float, stages: set[str]
) -> None:
    original = LlamaModel.__init__

    def changed(model: LlamaModel, *arguments: Any) -> None:
        original(model, *arguments)
        model.norm.register_forward_hook(lambda *call: call[-1] * factor)

    monkeypatch.setattr(LlamaModel, "__init__", changed)
    check = TrainCheck(TrainOptions(model=MODEL), "cpu/float32", "cpu/float32", golden=golden)
    changes = find_code_changes(check, SilentProgress())
    assert {change.stage for change in changes} == stages, changes
