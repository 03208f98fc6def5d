"""Shows why ZeRO-1 and ZeRO-2 in float16 refuse offload: DeepSpeed never recovers from an overflow.

With gradients summed in float32, `averaged_gradients` survives a skipped step, and DeepSpeed empties
it only without offload (DeepSpeedZeroOptimizer.step of DeepSpeed 0.19.8).
"""

import pytest

from assay.launch import Rank, TimeLimits, World, call
from assay.progress import Progress
from assay.training.batches import plan_batches
from assay.training.protocol import TrainingPlan
from assay.training.reports import TrainOptions
from assay_smoke.trainers.deepspeed.trainer import DeepSpeedTrainer, Zero1Trainer

pytestmark = pytest.mark.long

LIMITS = TimeLimits(start_seconds=120.0, collective_seconds=60.0, body_seconds=120.0)
TRAINERS = {"deepspeed-zero1": Zero1Trainer, "deepspeed-zero2": DeepSpeedTrainer}
# Gradients of the first step overflow with 2**22, and do not with 2**12.
TOO_LARGE, TRIES = 2.0**22, 14


def skipped_steps(request: tuple[str, list[str]], _: Progress, __: Rank) -> list[bool]:
    """Repeat the same step from a loss scale that is too large, and return which steps are skipped."""
    name, offload = request
    batch = plan_batches(TrainOptions(model="micro:llama", steps=1, micro_batches=1))[0]
    trainer = TRAINERS[name]()
    features = frozenset({"loss-scaling", "mixed-precision", *offload})
    trainer.setup(TrainingPlan("micro:llama", "cpu/float16", micro_batches=1, features=features))
    trainer.engine.optimizer.loss_scaler.cur_scale = TOO_LARGE
    made = [trainer.step(batch).skipped for _ in range(TRIES)]
    trainer.teardown()
    return made


@pytest.mark.timeout(300)
def test_an_overflow_is_never_left_behind() -> None:
    world = World({"dp": 1}, limits=LIMITS)

    (on_device,) = call(skipped_steps, ("deepspeed-zero2", []), world=world)
    assert on_device[0]
    assert not on_device[-1]
    # If this fails, remove the rule.
    for trainer in ("deepspeed-zero1", "deepspeed-zero2"):
        (offloaded,) = call(skipped_steps, (trainer, ["cpu-offload"]), world=world)
        assert offloaded == [True] * TRIES, trainer
