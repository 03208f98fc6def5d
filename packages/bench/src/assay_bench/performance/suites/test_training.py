"""Time of a training step."""

import math

from assay.models import LoadedModel
from assay.training.batches import coder_of, training_batches
from assay.training.protocol import TrainingPlan
from assay.training.trainers.reference import ReferenceTrainer
from assay_bench.performance.requests import SuiteRequest
from assay_bench.performance.suites.measurement import Amounts, SuiteTimer, count_flops

NUM_MICRO_BATCHES = 2


def test_training_step(
    measure: SuiteTimer, suite_request: SuiteRequest, loaded: LoadedModel
) -> None:
    """Run forward, backward, clipping and AdamW over two micro-batches with the reference trainer."""
    del loaded  # requested because it sets the number of threads
    plan = TrainingPlan(
        model=suite_request.model, run=suite_request.run, micro_batches=NUM_MICRO_BATCHES
    )
    trainer = ReferenceTrainer()
    trainer.setup(plan)
    (batch,) = training_batches(
        coder_of(suite_request.model), steps=1, micro_batches=NUM_MICRO_BATCHES
    )
    assert math.isfinite(trainer.step(batch).loss)
    num_tokens = sum(int(micro_batch["attention_mask"].sum()) for micro_batch in batch)
    flops = count_flops(lambda: trainer.step(batch))
    measure(lambda: batch, trainer.step, Amounts(num_tokens=num_tokens, num_flops=flops))
