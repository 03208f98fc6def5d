"""Faults in DeepSpeed's step fail in their phase with their diagnosis."""

from pathlib import Path

import pytest

from assay.verdicts import Outcome
from packages.smoke.tests.checking_deepspeed import check_zero2

PLANTED = Path(__file__).parents[1] / "planted_deepspeed.py"


@pytest.mark.parametrize(
    ("trainer", "phase", "diagnosis"),
    [
        ("ZeroClippedBeforeUnscaling", "clip", "clip-norm"),
        ("ZeroOnlyLastMicroBatch", "backward", "missing-reduction"),
    ],
)
def test_a_planted_fault_fails_by_its_name(
    tmp_path: Path, trainer: str, phase: str, diagnosis: str
) -> None:
    verdict = check_zero2(f"{PLANTED}:{trainer}", tmp_path)

    assert verdict.verdict is Outcome.FAIL
    assert verdict.location is not None
    assert (verdict.location.phase, verdict.diagnosis) == (phase, diagnosis)
