"""Loops with the required methods alone, or with some phases outside of methods."""

from pathlib import Path

import pytest

from assay.verdicts import Outcome, Verdict
from packages.core.tests.faults.training_corpus import PLANTS
from packages.core.tests.subsystem.commands import run_in_process
from packages.core.tests.subsystem.training.conftest import CheckPlant

pytestmark = pytest.mark.long

LOOPS = Path(__file__).parents[2] / "false_alarms" / "minimal_trainers.py"


def invisible(verdict: Verdict) -> list[str]:
    return [note.split(" is not")[0] for note in verdict.notes if " is not visible" in note]


def test_optimizer_shows_gradients_and_updates_without_methods(check_plant: CheckPlant) -> None:
    verdict = check_plant(trainer=f"{LOOPS}:ClearsAtTheEnd", dtype="bfloat16")

    assert verdict.verdict is Outcome.NOT_COMPARED
    assert verdict.unmatched.expected == ["(model):labels"]
    assert invisible(verdict) == ["backward"]
    assert verdict.levels["updates"].verdict is Outcome.PASS


def test_closure_of_methods_passes(check_plant: CheckPlant) -> None:
    verdict = check_plant(trainer=f"{LOOPS}:ClosureOfMethods", dtype="bfloat16")

    assert verdict.verdict is Outcome.PASS
    assert invisible(verdict) == []


def test_scale_of_a_loss_without_a_method_is_a_power_of_two(check_plant: CheckPlant) -> None:
    verdict = check_plant(trainer=f"{LOOPS}:ScalesTheLoss", dtype="bfloat16")

    assert verdict.verdict is Outcome.NOT_COMPARED
    assert "the loss is scaled by 1024, taken off in clip" in verdict.notes


@pytest.mark.parametrize(
    ("fault", "phase", "diagnosis"),
    [
        ("accumulation", "backward", "missing-reduction"),
        ("clip", "clip", "clip-norm"),
        ("optimizer", "optimizer", "optimizer-update"),
    ],
)
def test_fault_outside_of_methods_is_named(
    check_plant: CheckPlant, fault: str, phase: str, diagnosis: str
) -> None:
    verdict = check_plant(trainer=f"{LOOPS}:Closure__{fault}", dtype="bfloat16")

    assert verdict.verdict is Outcome.FAIL
    assert verdict.location is not None
    assert (verdict.location.phase, verdict.diagnosis) == (phase, diagnosis)


def test_update_of_one_step_that_is_a_tenth_too_small_is_found_in_bfloat16(
    check_plant: CheckPlant,
) -> None:
    plant = PLANTS / "scaled_updates.py"
    verdict = check_plant(trainer=f"{plant}:FirstUpdateTooSmall", dtype="bfloat16")

    assert verdict.verdict is Outcome.FAIL
    assert verdict.diagnosis == "optimizer-update"
    assert verdict.location is not None
    assert verdict.location.module is None


@pytest.mark.parametrize(("fault", "code"), [("", 3), ("__optimizer", 1)])
def test_schedule_is_compared_with_the_stated_one(tmp_path: Path, fault: str, code: int) -> None:
    run = run_in_process(
        tmp_path / "run", "check", "train", "micro:llama", "--reference", "cpu/float32",
        "--candidate", "cpu/bfloat16", "--candidate-trainer", f"{LOOPS}:WarmsUp{fault}",
    )  # fmt: skip

    assert run.code == code, run.stderr
