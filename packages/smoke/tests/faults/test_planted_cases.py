"""Every planted fault fails a case at its level in time, and the next case is clean."""

from pathlib import Path

import pytest

from assay.launch import TimeLimits
from assay.runs import SilentProgress
from assay.verdicts import Outcome, Verdict
from assay_smoke.cases.running import CaseRun
from assay_smoke.matrix.rules import Case
from packages.smoke.tests.faults.corpus import (
    BFLOAT16,
    FSDP,
    HUGGING_FACE,
    MERGED,
    ONE,
    PLANTS,
    ZERO2,
    Plant,
)

TESTS = Path(__file__).parents[1]
LIMITS = TimeLimits(start_seconds=120.0, collective_seconds=30.0, body_seconds=60.0)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("references")


def run(case: Case, folder: Path, references: Path, trainer: str | None = None) -> Verdict:
    file = "planted_deepspeed" if case.framework == "zero2" else "planted_trainers"
    name = f"{TESTS}/{file}.py:{trainer}" if trainer else None
    return CaseRun(case, "cpu", references, name, limits=LIMITS).run(folder, SilentProgress())


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.trainer)
def test_planted_fault_fails_at_its_level(plant: Plant, tmp_path: Path, references: Path) -> None:
    verdict = run(plant.case, tmp_path, references, plant.trainer)

    assert verdict.verdict is Outcome.FAIL
    failed = {n: level for n, level in verdict.levels.items() if level.verdict is Outcome.FAIL}
    assert next(iter(failed)) == plant.level, {n: level.reason for n, level in failed.items()}
    assert verdict.diagnosis == plant.diagnosis
    assert plant.says in str(failed[plant.level].reason)


@pytest.mark.parametrize(
    "case", [ONE, FSDP, ZERO2, BFLOAT16, HUGGING_FACE, MERGED], ids=lambda case: case.id
)
def test_next_case_is_clean(case: Case, tmp_path: Path, references: Path) -> None:
    verdict = run(case, tmp_path, references)

    assert verdict.verdict is Outcome.PASS, verdict.levels
