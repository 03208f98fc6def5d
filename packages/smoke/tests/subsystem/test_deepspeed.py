"""DeepSpeed with ZeRO, checked phase by phase. tests/faults has faulty variants."""

from pathlib import Path

import pytest

from assay.verdicts import Outcome
from packages.smoke.tests.checking_deepspeed import check_zero2

pytestmark = pytest.mark.long


def test_zero2_trains_as_the_reference_does(tmp_path: Path) -> None:
    verdict = check_zero2("deepspeed-zero2", tmp_path)

    assert verdict.verdict is Outcome.PASS, verdict.levels
    compared = {name for name, level in verdict.levels.items() if level.compared}
    assert compared == {
        "load", "inputs", "loss", "activations", "gradients", "updates", "replicas", "checkpoint"
    }  # fmt: skip
    notes = " ".join(verdict.notes)
    assert "taken off in clip; the number of ranks in it in backward" in notes
    assert "reduce is not visible: DeepSpeed reduces gradients within backward" in notes
