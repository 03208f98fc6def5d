"""DeepSpeed's universal checkpoints: what two ranks saved goes on in one, and what one saved in two."""

from pathlib import Path

import pytest

from assay.launch import Rank, TimeLimits, World, launch_world
from assay.training.processes.golden import plan_batches
from assay.training.processes.requests import TrainOptions
from assay.training.protocol import TrainingPlan
from assay.training.state.files import fingerprint
from assay.training.state.states import collect_state
from assay_smoke.trainers.deepspeed.universal import UniversalTrainer

LIMITS = TimeLimits(start_seconds=120.0, collective_seconds=60.0, body_seconds=120.0)
RUN = "cpu/bfloat16"

Hashes = dict[str, str]


def go_on(rank: Rank, source: Path | None, target: Path, step: int) -> tuple[Hashes, Hashes]:
    """Load what there is, make a step, save.

    Returns: hashes of every parameter, moment and float32 copy, whole: as loaded, and as saved.
    """
    batch = plan_batches(TrainOptions(model="micro:llama", steps=2, micro_batches=2))[step]
    trainer = UniversalTrainer()
    mesh = {"dp": rank.size} if rank.size > 1 else {}
    trainer.setup(TrainingPlan("micro:llama", RUN, mesh=mesh, micro_batches=2))
    if source is not None:
        trainer.load(source)
    loaded = values_of(trainer)
    trainer.step(batch)
    trainer.save(target)
    saved = values_of(trainer)
    trainer.teardown()
    return loaded, saved


def values_of(trainer: UniversalTrainer) -> Hashes:
    state = collect_state(trainer, "cpu")
    return fingerprint({part: state[part] for part in ("model", "moments")})


@pytest.mark.timeout(300)
def test_a_checkpoint_of_two_ranks_goes_on_in_one_and_back(tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    two = World({"dp": 2}, limits=LIMITS)
    one = World({"dp": 1}, limits=LIMITS)

    (_, of_two), _ = launch_world(go_on, two, None, first, 0)
    ((in_one, of_one),) = launch_world(go_on, one, first, second, 1)
    (in_two, _), _ = launch_world(go_on, two, second, third, 1)

    # Float32 copies are among them, without which the parameters would be loaded rounded.
    assert any("master" in name for name in of_two)
    assert of_two != of_one
    assert in_one == of_two
    assert in_two == of_one
