"""`assay check train` on a micro model: clean runs pass, planted faults are found where they are."""

import json
from pathlib import Path
from typing import Any

import pytest

from assay.runs.results import read_measurements
from assay.verdicts import Outcome, Verdict
from packages.core.tests.faults.training_corpus import PLANTS
from packages.core.tests.subsystem.training.conftest import CheckPlant, RunTrain

LEVELS = ("load", "inputs", "loss", "activations", "gradients", "updates", "replicas", "checkpoint")
FALSE_ALARMS = Path(__file__).parents[2] / "false_alarms"
ATTENTION = "model.layers.1.self_attn"
BUFFER = "model.rotary_emb.inv_freq"


def place(verdict: Verdict) -> tuple[Any, ...]:
    assert verdict.location is not None
    location = verdict.location
    return location.phase, location.module, location.parameter, verdict.diagnosis


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_clean_run_passes_at_every_level(train: RunTrain, dtype: str) -> None:
    run = train("--candidate", f"cpu/{dtype}", "--json")

    assert run.code == 0, run.stderr
    verdict = json.loads(run.stdout)
    assert verdict == run.verdict
    assert tuple(verdict["levels"]) == LEVELS
    assert {name: level["verdict"] for name, level in verdict["levels"].items()} == {
        name: None if name == "replicas" else "PASS" for name in LEVELS
    }
    assert verdict["unmatched"]["expected"] == []
    assert verdict["levels"]["gradients"]["compared"] > 200
    assert (
        verdict["levels"]["updates"]["compared"] == 7 * 39 + 2
    )  # the update, two moments and their count, what changed later, both ends; all updates together,
    # and what is not trained
    assert any("largest difference of a loss" in note for note in verdict["notes"])
    assert (run.folder / "report.html").is_file()
    assert "PASS: micro:llama" in run.stderr


def test_failure_says_what_where_and_what_next(train: RunTrain, tmp_path: Path) -> None:
    setup = tmp_path / "plant.py"
    setup.write_text(
        "import torch\n"
        "def detach(model):\n"
        f"    keys = model.get_submodule('{ATTENTION}.k_proj')\n"
        "    forward = keys.forward\n"
        "    keys.forward = lambda x: torch.cat(\n"
        "        [forward(x)[..., :24].detach(), forward(x)[..., 24:]], -1)\n"
    )
    run = train(
        "--candidate", "cpu/bfloat16", "--candidate-setup", f"{setup}:detach", "--keep", "verdict"
    )

    assert run.code == 1, run.stderr
    assert not [path for path in run.folder.iterdir() if path.is_dir()]
    assert run.verdict["location"] == {
        "phase": "backward", "step": 0, "rank": 0, "module": f"{ATTENTION}.k_proj", "op": None,
        "parameter": f"{ATTENTION}.k_proj.weight",
    }  # fmt: skip
    lines = run.stdout.splitlines()
    assert lines[1] == (
        f"{ATTENTION}.k_proj, parameter weight (backward, step 0) differs from the reference."
    )
    assert "its inputs and output gradients are the reference's own: the error is made here" in (
        run.stdout
    )
    assert "Next: assay explain module-error" in run.stdout


def test_norms_of_a_halved_loss_scale_are_measured_step_by_step(
    check_plant: CheckPlant, tmp_path: Path
) -> None:
    check_plant(trainer="BackwardOfScaledLoss")

    rows, _ = read_measurements(tmp_path)
    curves = {
        name: [row for row in rows if row.statistic == f"candidate-{name}"]
        for name in ("loss", "grad-norm")
    }
    assert [row.step for row in curves["grad-norm"]] == [0, 1, 2]
    # The loss of the first step is reported before anything is differentiated.
    assert curves["loss"][0].actual == pytest.approx(curves["loss"][0].expected, rel=1e-5)
    for row in curves["grad-norm"]:
        assert row.actual == pytest.approx(row.expected / 2, rel=1e-3)


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        ({"trainer": "MeanOfMeans"}, ("forward", "", None, "loss-scale")),
        ({"trainer": "ClippedByHalfOfTheNorm"}, ("clip", None, None, "clip-norm")),
        pytest.param(
            {"trainer": "OptimizerOverClones"},
            ("optimizer", None, None, "frozen-parameters"),
            marks=pytest.mark.long,
        ),
        ({"trainer": "TwiceTheLearningRate"}, ("optimizer", None, None, "optimizer-update")),
        ({"trainer": "MomentsDropped"}, ("checkpoint", None, None, "checkpoint-mismatch")),
        pytest.param(
            {"trainer": "GeneratorsNotRestored"},
            ("checkpoint", None, None, "rng-state"),
            marks=pytest.mark.long,
        ),
        (
            {"trainer": "OneTensorSavedAsZeros"},
            (
                "checkpoint",
                f"{ATTENTION}.o_proj",
                f"{ATTENTION}.o_proj.weight",
                "checkpoint-mismatch",
            ),
        ),
        pytest.param(
            {"setup": "one_norm_detached_on_half"},
            (
                "backward",
                "model.layers.1.input_layernorm",
                "model.layers.1.input_layernorm.weight",
                "missing-reduction",
            ),
            marks=pytest.mark.long,
        ),
    ],
    ids=lambda value: next(iter(value.values())) if isinstance(value, dict) else "",
)
def test_planted_fault_is_found_in_its_phase(
    check_plant: CheckPlant, plant: dict[str, str], expected: tuple[Any, ...]
) -> None:
    assert place(check_plant(**plant)) == expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("* 1.02", f"{BUFFER} changed after loading, before the first forward pass"),
        pytest.param(".bfloat16()", f": {BUFFER}", marks=pytest.mark.long),
    ],
)
def test_a_changed_buffer_that_no_state_holds_is_named(
    check_plant: CheckPlant, tmp_path: Path, change: str, words: str
) -> None:
    setup = tmp_path / "setup.py"
    setup.write_text(
        "def change(model):\n"
        "    rotary = model.model.rotary_emb\n"
        f"    rotary.inv_freq = rotary.inv_freq{change}\n"
    )
    verdict = check_plant(setup=f"{setup}:change")
    assert place(verdict) == ("forward", "model.rotary_emb", BUFFER, "weight-mismatch")
    assert any(words in text for text in (str(verdict.levels["load"].reason), *verdict.notes))


@pytest.mark.long
def test_recompute_that_loses_the_generator_is_found_in_backward(check_plant: CheckPlant) -> None:
    verdict = check_plant(trainer="RecomputeLosesGenerator", lora=True)

    phase, module, _, diagnosis = place(verdict)
    assert (phase, diagnosis) == ("backward", "rng-state")
    assert "lora_dropout" in module


@pytest.mark.long
@pytest.mark.parametrize(
    "trainer", ["Recomputes", "RecomputesReentrantly", "RecomputesAsAnAccelerator"]
)
def test_recompute_by_itself_passes(check_plant: CheckPlant, trainer: str) -> None:
    verdict = check_plant(trainer=trainer, lora=True)

    assert verdict.verdict is Outcome.PASS, verdict.location


@pytest.mark.long
def test_reduction_within_backward_passes(check_plant: CheckPlant) -> None:
    assert check_plant(trainer="ReducesInBackward").verdict is Outcome.PASS


@pytest.mark.long
@pytest.mark.parametrize("name", ["LossOfTheModel", "ClippingByOneVector"])
def test_other_ways_to_compute_a_loss_or_a_norm_pass(check_plant: CheckPlant, name: str) -> None:
    verdict = check_plant(trainer=f"{FALSE_ALARMS / 'trainers.py'}:{name}")

    assert verdict.verdict is Outcome.PASS, verdict.location


@pytest.mark.long
def test_a_loss_beside_the_models_own_passes(train: RunTrain) -> None:
    trainer = f"{FALSE_ALARMS / 'trainers.py'}:LossBesideTheModels"
    # Its logits are made behind the head: only a crossing of their own keeps them in the graph.
    run = train("--candidate", "cpu/bfloat16", "--candidate-trainer", trainer, model="micro:gemma2")

    assert run.code == 0, run.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "diagnosis", "phase", "lora"),
    [
        ("MasterWeightsForgotten", "checkpoint-mismatch", "checkpoint", False),
        ("MomentsForgottenInSecret", "checkpoint-mismatch", "checkpoint", False),
        ("OtherSettingsSaved", "checkpoint-mismatch", "checkpoint", False),
        ("FirstMomentsSavedAgain", "checkpoint-mismatch", "checkpoint", False),
        ("OtherScaleSaved", "adapter-mismatch", "checkpoint", True),
        ("OptimizerMadeAnew", "optimizer-update", "optimizer", False),
        ("MicroBatchesCounted", "optimizer-update", "optimizer", False),
        ("ShrunkWhileClipping", "optimizer-update", "optimizer", False),
        ("BaseShrunkAfterwards", "optimizer-update", "optimizer", True),
    ],
)  # fmt: skip
def test_what_a_trainer_does_not_tell_is_found(
    check_plant: CheckPlant, name: str, diagnosis: str, phase: str, lora: bool
) -> None:
    trainer = f"{PLANTS / 'kept_state.py'}:{name}"
    verdict = check_plant(trainer=trainer, dtype="bfloat16", lora=lora)

    assert verdict.verdict is Outcome.FAIL
    assert verdict.location is not None
    assert (verdict.diagnosis, verdict.location.phase) == (diagnosis, phase)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "diagnosis", "phase", "options"),
    [
        ("SavingDropsMoments", "checkpoint-mismatch", "checkpoint", {"dtype": "bfloat16"}),
        ("SavingLowersTheRate", "checkpoint-mismatch", "checkpoint", {"dtype": "bfloat16"}),
        ("SavingFreezesTheHead", "checkpoint-mismatch", "checkpoint", {"dtype": "bfloat16"}),
        ("SavingLeavesAHook", "optimizer-update", "optimizer", {}),
        ("ThirdUpdateIsHalf", "optimizer-update", "optimizer", {}),
        ("CountsTwice", "optimizer-update", "optimizer", {"dtype": "bfloat16"}),
        ("HalfPrecisionDeclared", "checkpoint-mismatch", "checkpoint", {}),
        ("AdapterStartsAtZero", "adapter-mismatch", "forward", {"lora": True}),
        ("FewerLayersNamed", "adapter-mismatch", "checkpoint", {"lora": True}),
        ("AdapterLeavesOutLayers", "adapter-mismatch", "checkpoint", {"lora": True}),
        ("AdapterOfRankOne", "adapter-mismatch", "forward", {"lora": True}),
        ("MasksRepeated", "rng-state", "forward", {"lora": True, "dtype": "bfloat16"}),
        ("OtherEndOfTextSaved", "checkpoint-mismatch", "checkpoint", {}),
        ("LargestPartWins", "missing-reduction", "reduce", {"mesh": {"dp": 2}}),
    ],
)  # fmt: skip
def test_what_happens_between_the_steps_is_found(
    check_plant: CheckPlant, name: str, diagnosis: str, phase: str, options: dict[str, Any]
) -> None:
    verdict = check_plant(trainer=f"{PLANTS / 'around_the_step.py'}:{name}", **options)

    assert verdict.verdict is Outcome.FAIL
    assert verdict.location is not None
    assert (verdict.diagnosis, verdict.location.phase) == (diagnosis, phase)


@pytest.mark.long
@pytest.mark.parametrize("name", ["input_kept_in_8_bits", "mask_left_out"])
def test_layer_computed_again_from_something_else_is_found(
    check_plant: CheckPlant, name: str
) -> None:
    verdict = check_plant(setup=f"{PLANTS / 'recomputed.py'}:{name}", dtype="bfloat16")

    assert verdict.verdict is Outcome.FAIL
    assert verdict.location is not None
    assert (verdict.location.phase, verdict.location.module) == ("backward", "model.layers.1")


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("first_tile_of_the_first_row", "model.layers.1.mlp"),
        ("lengths_in_place_of_the_mask", ATTENTION),
    ],
)
def test_what_shows_in_unequal_rows_alone_is_found(
    check_plant: CheckPlant, name: str, module: str
) -> None:
    verdict = check_plant(setup=f"{PLANTS / 'batch_rows.py'}:{name}")

    phase, found, _, diagnosis = place(verdict)
    assert (phase, found, diagnosis) == ("forward", module, "module-error")


@pytest.mark.long
@pytest.mark.parametrize(
    ("trainer", "setup"),
    [
        ("EvaluatesInItsSteps", None),
        ("PositionsGiven", None),
        ("CountsInABuffer", None),
        ("ClipsInItsOptimizer", None),
        ("KeepsSumsOfItsOwn", None),
        ("LossOfAllClasses", None),
        (None, "own_projections"),
    ],
)
def test_unusual_and_correct_training_passes(
    check_plant: CheckPlant, trainer: str | None, setup: str | None
) -> None:
    verdict = check_plant(
        trainer=trainer and f"{FALSE_ALARMS / 'trainers.py'}:{trainer}",
        setup=setup and f"{FALSE_ALARMS / 'setups.py'}:{setup}",
    )

    assert verdict.verdict is Outcome.PASS, verdict.location


@pytest.mark.long
def test_updates_that_cannot_be_seen_are_no_pass(check_plant: CheckPlant) -> None:
    verdict = check_plant(trainer=f"{FALSE_ALARMS / 'trainers.py'}:StepsOnCopies")

    assert verdict.verdict is Outcome.NOT_COMPARED
    assert verdict.levels["updates"].verdict is Outcome.NOT_COMPARED


@pytest.mark.long
def test_a_checkpoint_that_users_cannot_load_is_not_a_pass(check_plant: CheckPlant) -> None:
    verdict = check_plant(trainer="SavesElsewhere")

    assert verdict.verdict is Outcome.NOT_COMPARED
    assert (
        verdict.levels["checkpoint"].reason == "the checkpoint has no model that users could load"
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "trainer", [f"{FALSE_ALARMS / 'trainers.py'}:HasNoOptimizerStep", "StepsByItself"]
)
def test_stage_that_is_never_seen_is_not_a_pass(check_plant: CheckPlant, trainer: str) -> None:
    verdict = check_plant(trainer=trainer)

    assert verdict.verdict is Outcome.NOT_COMPARED
    level = verdict.levels["gradients"]
    assert level.verdict is Outcome.NOT_COMPARED
    assert level.reason == "never called: reduce_gradients"
    # The step of the optimizer itself shows them.
    assert verdict.levels["updates"].verdict is Outcome.PASS
