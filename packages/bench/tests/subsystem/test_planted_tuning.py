"""A fault planted in the training of a tuning: the model has not learned what was held out."""

from pathlib import Path

from torch import Tensor, nn

from assay.models.load import chosen_threads
from assay.training import ReferenceTrainer, TrainingPlan
from assay.training.batches import coder_of
from assay.training.overfit.sides import LABELS, measure_memorization
from assay.training.protocol import MicroBatch
from assay.verdicts import Outcome
from assay_bench.tuning.rank_tasks import draw_step, held_out_rows, read_texts
from assay_bench.tuning.records import DataSource, Permutation, TuningRecipe
from assay_bench.tuning.running import HeldOutPart, judge_held_out
from packages.bench.tests.unit.tuning.test_running import tuning

MODEL, STEPS = "micro:llama", 40
RECIPE = TuningRecipe(
    models=[MODEL],
    run="cpu/float32",
    seeds=[0],
    steps=STEPS,
    batch_size=4,
    sequence_length=32,
    checkpoint_every=STEPS,
    data=[DataSource(source="sums")],
    permutations={"full": Permutation(learning_rate=3e-3)},
)
PLAN = TrainingPlan(MODEL, RECIPE.run, steps=STEPS, micro_batches=1, learning_rate=3e-3)


class LabelsNotShifted(ReferenceTrainer):
    """Predicts each token from itself."""

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        labels = micro_batch["labels"].roll(1, dims=1)
        return super().compute_loss({**micro_batch, "labels": labels}, num_step_tokens)


def judged(trainer: ReferenceTrainer) -> Outcome | None:
    texts, coder = read_texts(RECIPE, Path()), coder_of(MODEL)
    rows = held_out_rows(texts["sums"], RECIPE, coder)

    def measure(model: nn.Module) -> list[float]:
        return [measure_memorization(model, [row]).nats[LABELS] for row in rows]

    with chosen_threads(1):
        trainer.setup(PLAN)
        before = measure(trainer.model)
        for step in range(STEPS):
            trainer.step(draw_step(texts, RECIPE, coder, seed=0, step=step, ranks=1))
        learned = HeldOutPart(before, measure(trainer.model), margin=0.0)
    return judge_held_out(learned, tuning()).level.verdict


def test_a_healthy_training_passes() -> None:
    assert judged(ReferenceTrainer()) is Outcome.PASS


def test_a_planted_fault_fails() -> None:
    assert judged(LabelsNotShifted()) is Outcome.FAIL
