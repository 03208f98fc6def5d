"""Training on several ranks, held to the one process of the reference."""

import pytest

from packages.core.tests.faults.training_corpus import PLANTS
from packages.core.tests.subsystem.training.conftest import CheckPlant

MESH = {"dp": 2}


# Without copies of anything there are no replicas to compare.
LEVELS = {"load", "inputs", "loss", "activations", "gradients", "updates", "checkpoint"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("trainer", "mesh", "levels"),
    [
        ("reference", {"dp": 2}, LEVELS | {"replicas"}),
        ("ddp", {"dp": 2}, LEVELS | {"replicas"}),
        ("fsdp", {"dp": 2}, LEVELS | {"replicas"}),
        ("tensor-parallel", {"tp": 2}, LEVELS | {"replicas"}),
        ("pipeline", {"pp": 2}, LEVELS),
    ],
)
def test_two_ranks_train_as_one_process_does(
    check_plant: CheckPlant, trainer: str, mesh: dict[str, int], levels: set[str]
) -> None:
    verdict = check_plant(trainer=trainer, mesh=mesh)

    assert verdict.verdict.value == "PASS", verdict.levels
    assert {name for name, level in verdict.levels.items() if level.compared} == levels
    assert not verdict.unmatched.expected
    assert verdict.candidate["mesh"] == mesh
    unmeasured = [note for note in verdict.notes if "no rank has all of (model), model" in note]
    assert bool(unmeasured) == (trainer == "pipeline")


def test_a_stage_that_loses_its_gradients_for_another_length_is_found(
    check_plant: CheckPlant,
) -> None:
    verdict = check_plant(trainer=f"{PLANTS / 'batch_rows.py'}:StageBuiltAnew", mesh={"pp": 2})

    assert verdict.location is not None
    # In the first step all micro-batches have one shape.
    assert (verdict.location.phase, verdict.location.step) == ("backward", 1)
    assert verdict.diagnosis == "missing-reduction"


@pytest.mark.long
def test_stages_with_adapters_train_as_one_process_does(check_plant: CheckPlant) -> None:
    verdict = check_plant(trainer="pipeline", mesh={"pp": 2}, lora=True)

    assert verdict.verdict.value == "PASS", verdict.levels
    assert {name for name, level in verdict.levels.items() if level.compared} == LEVELS
    assert "lora" in verdict.candidate["features"]


@pytest.mark.long
def test_an_adapter_scaled_on_one_stage_is_found_there(check_plant: CheckPlant) -> None:
    trainer = f"{PLANTS / 'ranks.py'}:AdapterOfOneStageScaled"
    verdict = check_plant(trainer=trainer, mesh={"pp": 2}, lora=True)

    assert verdict.verdict.value == "FAIL"
    assert verdict.location is not None
    # In the first step adapters add nothing yet: it shows on the way back, at the last one first.
    assert (verdict.location.phase, verdict.location.rank) == ("backward", 1)
    assert (verdict.location.module or "").startswith("model.layers.3.mlp.down_proj")
    assert verdict.diagnosis == "module-error"


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "phase", "diagnosis", "parameter"),
    [
        ("NothingReduced", "reduce", "missing-reduction", None),
        ("NormNotReduced", "reduce", "missing-reduction", "model.layers.1.input_layernorm.weight"),
        ("MeanOverRanks", "reduce", "loss-scale", None),
        ("FirstRankForAll", "reduce", "missing-reduction", "model.layers.2.mlp.gate_proj.weight"),
        ("LocalTokenCount", "forward", "loss-scale", None),
        ("SameMicroBatchOnAllRanks", "inputs", "inputs-differ", None),
        ("RankLearnsFaster", "optimizer", "optimizer-update", None),
        ("RankLoadsOtherMoments", "checkpoint", "checkpoint-mismatch", None),
        ("MeanOfBuckets", "backward", "loss-scale", None),
        ("RouterStaysLocal", "backward", "missing-reduction", "model.layers.2.mlp.gate_proj.weight"),
    ],
)  # fmt: skip
def test_fault_between_ranks_is_found_where_it_is_made(
    check_plant: CheckPlant, name: str, phase: str, diagnosis: str, parameter: str | None
) -> None:
    verdict = check_plant(trainer=f"{PLANTS / 'ranks.py'}:{name}", mesh=MESH)

    assert verdict.verdict.value == "FAIL"
    assert verdict.location is not None
    assert (verdict.location.phase, verdict.diagnosis) == (phase, diagnosis)
    if parameter is not None:
        assert verdict.location.parameter == parameter
