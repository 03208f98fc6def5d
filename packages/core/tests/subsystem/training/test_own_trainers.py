"""Trainers of users: the example of the documentation, and which generators have to be saved."""

import shutil
from pathlib import Path

import pytest

from assay.models.sources import resolve_model
from assay.verdicts import Outcome
from packages.core.tests.subsystem.training.conftest import CheckPlant, RunTrain
from packages.core.tests.unit.models.test_config_files import write_word_tokenizer

pytestmark = pytest.mark.long

EXAMPLE = Path(__file__).parents[5] / "examples" / "own_trainer.py"
TRAINERS = Path(__file__).with_name("own_trainers.py")


def test_example_passes(check_plant: CheckPlant) -> None:
    verdict = check_plant(trainer=f"{EXAMPLE}:OwnTrainer")

    assert verdict.verdict is Outcome.PASS
    assert not any("not visible" in note for note in verdict.notes)


def test_example_fails_where_its_loss_is_divided_by_the_wrong_number(
    check_plant: CheckPlant, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong_trainer.py"
    source = EXAMPLE.read_text(encoding="utf-8")
    right = "return summed / num_step_tokens\n"
    assert source.count(right) == 1
    wrong.write_text(source.replace(right, "return summed / count_label_tokens(micro_batch)\n"))
    verdict = check_plant(trainer=f"{wrong}:OwnTrainer")

    assert verdict.verdict is Outcome.FAIL
    assert verdict.diagnosis == "loss-scale"
    assert verdict.location is not None
    assert verdict.location.phase == "forward"
    assert verdict.levels["activations"].verdict is Outcome.PASS


def test_loop_without_methods_for_loss_and_backward_is_compared_but_for_its_labels(
    check_plant: CheckPlant, tmp_path: Path
) -> None:
    closed = tmp_path / "closed_trainer.py"
    source = EXAMPLE.read_text(encoding="utf-8")
    for method in ("compute_loss", "backward"):
        source = source.replace(f"def {method}(", f"def own_{method}(")
        source = source.replace(f"self.{method}(", f"self.own_{method}(")
    closed.write_text(source)
    verdict = check_plant(trainer=f"{closed}:OwnTrainer")

    assert verdict.verdict is Outcome.NOT_COMPARED
    assert verdict.unmatched.expected == ["(model):labels"]
    levels = ("loss", "activations", "gradients", "updates", "checkpoint")
    assert {verdict.levels[name].verdict for name in levels} == {Outcome.PASS}


CLIPPING = "norm = self.clip_gradients(self.plan.max_grad_norm)"
NOT_CLIPPED = ("self.model.parameters(), max_norm)", "self.model.parameters(), float('inf'))")
IN_THE_LOOP = (f"        {CLIPPING}", f"            {CLIPPING}")


@pytest.mark.parametrize("hides_backward", [True, False])
@pytest.mark.parametrize(
    ("plant", "reason"),
    [
        (NOT_CLIPPED, None),
        (IN_THE_LOOP, "gradients are clipped in the middle of a step"),
    ],
)
def test_wrong_clipping_is_named_whether_or_not_backward_is_a_method(
    check_plant: CheckPlant, tmp_path: Path, plant: tuple[str, str], reason: str | None,
    hides_backward: bool,
) -> None:  # fmt: skip
    wrong = tmp_path / "wrong_trainer.py"
    source = EXAMPLE.read_text(encoding="utf-8").replace(*plant)
    wrong.write_text(
        source.replace("self.backward(loss)", "loss.backward()") if hides_backward else source
    )
    verdict = check_plant(trainer=f"{wrong}:OwnTrainer")

    assert verdict.diagnosis == "clip-norm"
    assert verdict.location is not None
    assert (verdict.location.phase, verdict.location.module) == ("clip", None)
    if reason:
        assert reason in str(verdict)
    elif hides_backward:
        assert "the norm before clipping agrees with the reference's" in str(verdict)


@pytest.mark.parametrize("name", ["SavesTorchGenerator", "SeedsPythonInEveryStep"])
def test_only_generators_that_steps_depend_on_have_to_be_saved(
    check_plant: CheckPlant, name: str
) -> None:
    assert check_plant(trainer=f"{TRAINERS}:{name}", lora=True).verdict is Outcome.PASS


def test_generator_that_steps_draw_from_has_to_be_saved(check_plant: CheckPlant) -> None:
    verdict = check_plant(trainer=f"{TRAINERS}:DrawsFromPython", lora=True)

    assert verdict.verdict is Outcome.FAIL
    assert verdict.diagnosis == "rng-state"
    assert verdict.location is not None
    assert verdict.location.phase == "checkpoint"


def test_saved_model_without_the_tokenizer_is_noted(train: RunTrain, tmp_path: Path) -> None:
    recipe = resolve_model("micro:llama").recipe
    assert recipe is not None
    model = tmp_path / "model"
    shutil.copytree(recipe.folder, model)
    write_word_tokenizer(model)
    done = train(
        "--candidate",
        "cpu/float32",
        "--candidate-trainer",
        f"{EXAMPLE}:OwnTrainer",
        model=str(model),
    )

    assert done.code == 0, done.stdout
    assert f"the saved model lacks the tokenizer of {model}" in done.verdict["notes"]


@pytest.mark.parametrize("excess", [0, 0.01])
def test_loss_of_a_model_with_a_soft_cap_rounds_the_capped_logits(
    train: RunTrain, tmp_path: Path, excess: float
) -> None:
    trainer = tmp_path / "loss_of_the_model.py"
    trainer.write_text(
        "from assay.training import ReferenceTrainer\n"
        "class LossOfTheModel(ReferenceTrainer):\n"
        "    def compute_loss(self, micro_batch, num_step_tokens):\n"
        "        loss = self.model(**micro_batch, num_items_in_batch=num_step_tokens).loss\n"
        f"        return loss + {excess} * loss.detach()\n"
    )
    arguments = ("--candidate", "cpu/bfloat16", "--candidate-trainer", f"{trainer}:LossOfTheModel")
    verdict = train(*arguments, model="micro:gemma2").verdict

    expected = "FAIL" if excess else "PASS"
    assert verdict["verdict"] == expected
    assert verdict["levels"]["loss"]["verdict"] == expected
