"""What a plan asks for beyond plain training, in whole checks and on ranks."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.errors import UsageError
from assay.training import training_batches
from assay.training.batches import coder_of
from assay.training.protocol import StepReport, TrainingPlan
from assay.training.state.files import fingerprint
from assay.training.state.parameters import local_part
from assay.training.trainers.parallel import FSDPTrainer
from assay.verdicts import Outcome
from packages.core.tests.faults.training_corpus import PLANTS
from packages.core.tests.subsystem.training.conftest import CheckPlant

PLANT = f"{PLANTS / 'features.py'}"
LIBRARIES = Path(__file__).parents[2] / "false_alarms" / "library_trainers.py"
DP = {"dp": 2}
# Layers are compiled one by one, each for single rows and for several.
pytestmark = pytest.mark.timeout(400)


@pytest.mark.long
@pytest.mark.parametrize(
    ("trainer", "mesh", "dtype", "lora", "features"),
    [
        ("reference", {}, "float16", True, ("mixed-precision", "loss-scaling", "packed")),
        ("reference", {}, "float32", True, ("compile", "recompute")),
        ("ddp", DP, "float32", False, ("packed", "loss-scaling")),
        ("fsdp", DP, "float32", False, ("packed", "compile", "loss-scaling", "recompute")),
        ("fsdp", DP, "float16", False, ("mixed-precision", "loss-scaling", "packed")),
    ],
)
def test_features_train_as_the_reference_does(
    check_plant: CheckPlant,
    trainer: str,
    mesh: dict[str, int],
    dtype: str,
    lora: bool,
    features: tuple[str, ...],
) -> None:
    verdict = check_plant(trainer=trainer, mesh=mesh, dtype=dtype, lora=lora, features=features)

    assert verdict.verdict is Outcome.PASS, verdict.levels
    assert not verdict.unmatched.expected
    notes = " ".join(verdict.notes)
    for feature, shown in (
        ("compile", "compiled by aot_eager"),
        ("loss-scaling", "the loss is scaled by"),
    ):
        assert (shown in notes) == (feature in features)
    # The gradients of all weights overflow under the first scale, those of adapters do not.
    assert ("was skipped" in notes) == (dtype == "float16" and not lora)


@pytest.mark.long
def test_dropout_for_rows_that_a_trainer_lays_otherwise_is_refused(check_plant: CheckPlant) -> None:
    with pytest.raises(UsageError, match=r"runs micro-batches as one, and dropout .* by --packed$"):
        check_plant(trainer=f"{LIBRARIES}:Concatenated", lora=True)


def test_features_that_are_ignored_are_not_compared(check_plant: CheckPlant) -> None:
    verdict = check_plant(
        trainer=f"{PLANT}:IgnoresFeatures", features=("packed", "compile", "loss-scaling")
    )

    assert verdict.verdict is Outcome.NOT_COMPARED
    assert {
        name: verdict.levels[name].reason for name in ("inputs", "activations", "gradients")
    } == {
        "inputs": (
            "packed was asked for and is not applied: no step ran rows laid end to end in one"
        ),
        "activations": "compile was asked for and is not applied: nothing was compiled",
        "gradients": "loss-scaling was asked for and is not applied: no loss was scaled",
    }


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "features", "phase", "diagnosis"),
    [
        ("LabelAcrossTheSeam", ("packed",), "inputs", "inputs-differ"),
        ("OtherActivation", ("compile",), "forward", "module-error"),
    ],
)
def test_fault_of_a_feature_is_found_where_it_is_made(
    check_plant: CheckPlant, name: str, features: tuple[str, ...], phase: str, diagnosis: str
) -> None:
    verdict = check_plant(trainer=f"{PLANT}:{name}", features=features)

    assert verdict.location is not None
    assert (verdict.location.phase, verdict.diagnosis) == (phase, diagnosis)


class OverflowsOnOneRank(FSDPTrainer):
    """One element of what the last rank holds of the head's gradient overflows, once."""

    tries = 0

    def reduce_gradients(self) -> None:
        super().reduce_gradients()
        if self.rank == 1 and not self.tries:
            gradient: Any = self.model.get_parameter("lm_head.weight").grad
            local_part(gradient)[-1, -1] = torch.inf
        self.tries += 1


@pytest.mark.world(dp=2)
def test_overflow_on_one_rank_is_skipped_on_all() -> None:
    (batch,) = training_batches(coder_of("micro:llama"), steps=1, micro_batches=2)
    trainer = OverflowsOnOneRank()
    plan = TrainingPlan(
        "micro:llama", "cpu/float32", mesh={"dp": 2}, features=frozenset({"loss-scaling"})
    )
    trainer.setup(plan)
    before = fingerprint({n: local_part(v) for n, v in trainer.model.state_dict().items()})

    reports: list[StepReport] = [trainer.step(batch)]

    after = fingerprint({n: local_part(v) for n, v in trainer.model.state_dict().items()})
    assert before == after
    assert len(before) > 30
    reports.append(trainer.step(batch))
    assert [report.skipped for report in reports] == [True, False]
    assert math.isfinite(reports[1].grad_norm)
    assert trainer.scaler.get_scale() == 2.0**15
    trainer.teardown()
