"""The work of a case's ranks, world by world. Judges nothing."""

import gc
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from assay.devices.registry import describe_run
from assay.errors import AssayError
from assay.launch import Rank
from assay.training.batches import MicroBatch, copied
from assay.training.processes.candidate_side import CandidateSide
from assay.training.processes.requests import StepRecord
from assay.training.processes.skipped_steps import step_until_made
from assay.training.processes.trainer_report import ModelReport, TrainerReport, declared_traits
from assay.training.replay.conditions import comparable
from assay.training.state.files import fingerprint, read_golden_state
from assay.training.state.parameter_records import hash_held_parts, trajectory_of
from assay.training.state.parameters import named_parameters
from assay.training.state.sharding import local_part
from assay.training.state.states import current_state, inject_state
from assay.training.trainers.reference import MODEL_FOLDER
from assay.training.trainers.registry import OpenedTrainer, describe_trainer
from assay_smoke.cases.requests import (
    LAST_CHECKPOINT,
    TERMINATED_CHECKPOINT,
    CaseRequest,
    Hashes,
    StepsAnswer,
    Survivors,
    TrainAnswer,
)
from assay_smoke.cases.timeline import CyclePhase, Timeline
from assay_smoke.trainers.deepspeed.partitions import whole_size

_METHODS: dict[str, CyclePhase] = {
    "step": "step",
    "save": "checkpoint",
    "load": "resume",
    "teardown": "tear-down",
}
_SHOWN = 3


class WatchedSide(CandidateSide):
    """Opens trainers that record each call as a phase.

    ended: hashes of each trainer's model at its teardown, in order.
    """

    def __init__(self, request: CaseRequest, rank: Rank) -> None:
        super().__init__(request.candidate, rank)
        self.timeline = Timeline(Path(request.timelines) / f"rank-{rank.number}.jsonl", self.device)
        self.resume_at = request.candidate.options.resume_at
        self.folder = request.candidate.folder.parent
        self.ended: list[Hashes] = []

    def open(self) -> OpenedTrainer:
        """Open and set up a trainer."""
        with self.timeline.phase("set-up"):
            opened = super().open()
        self._num_steps = 0
        for method, phase in _METHODS.items():
            call = partial(self._call, opened, getattr(opened.trainer, method), phase)
            setattr(opened.trainer, method, call)
        return opened

    def _call(
        self,
        opened: OpenedTrainer,
        original: Callable[..., Any],
        phase: CyclePhase,
        *args: Any,  # noqa: ANN401 - of any trainer
    ) -> Any:  # noqa: ANN401
        """Call a method of the trainer as a phase."""
        if phase == "tear-down":
            self.ended.append(hash_model(opened, self.device.torch_device))
        with self.timeline.phase(phase, self._num_steps if phase == "step" else None):
            result = original(*args)
        if phase == "step":
            self._num_steps = getattr(result, "step", self._num_steps) + 1
        elif phase == "resume":
            self._num_steps = self.resume_at
        return result


def hash_model(opened: OpenedTrainer, torch_device: str) -> Hashes:
    """Hash every whole parameter and buffer. A collective."""
    return fingerprint({"model": current_state(opened.trainer, torch_device)["model"]})


def held_parameter_bytes(opened: OpenedTrainer, num_ranks: int) -> int:
    """Return the size of this rank's parameters or shards.

    A parameter that is whole only during its use, as under ZeRO-3, counts as an even share.
    """
    total = 0
    for item in named_parameters(opened.trainer.model):
        held = local_part(item.tensor).numel() or whole_size(item.tensor) // num_ranks
        total += held * item.tensor.element_size()
    return total


def live_tensors() -> dict[int, Tensor]:
    """Return every tensor that Python's garbage collector knows, by identity."""
    gc.collect()
    # type() instead of isinstance(): `__class__` of an arbitrary object may run code.
    return {id(item): item for item in gc.get_objects() if issubclass(type(item), Tensor)}


def survivors(before: dict[int, Tensor]) -> Survivors:
    """Return live tensors that are not in `before`, one per storage."""
    new = [tensor for key, tensor in live_tensors().items() if key not in before]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor for tensor in new if _has_storage(tensor)
    }
    sizes = sorted(storages.values(), key=lambda tensor: -tensor.untyped_storage().nbytes())
    return Survivors(
        num_bytes=sum(tensor.untyped_storage().nbytes() for tensor in sizes),
        shapes=[f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in sizes[:_SHOWN]],
    )


def _has_storage(tensor: Tensor) -> bool:
    if isinstance(tensor, DTensor):  # the garbage collector also knows the local tensor
        return False
    # Fake tensors of compilers name a real device, and their storage is on `meta`.
    return tensor.layout is torch.strided and tensor.untyped_storage().device.type != "meta"


def train(rank: Rank, request: CaseRequest) -> TrainAnswer:
    """Set up, train, save, train on and tear down; then resume in the same process."""
    side = WatchedSide(request, rank)
    alive = live_tensors()
    answer = _train(side, request, rank)  # its trainers are gone when it returns
    return replace(answer, after=side.ended[0], survivors=survivors(alive))


def _train(side: WatchedSide, request: CaseRequest, rank: Rank) -> TrainAnswer:
    opened = side.open()
    begin = side.begin(opened)
    trainer = opened.trainer
    inject_state(trainer, begin.own, side.device.torch_device)
    before = hash_model(opened, side.device.torch_device)
    described = describe_trainer(request.candidate.trainer, side.plan, trainer.model)
    parameter_bytes = held_parameter_bytes(opened, rank.size)
    report = TrainerReport(
        run=describe_run(side.device, side.run) | described,
        free=side.train_freely(opened, begin),
        coordinates=side.coordinates,
        traits=declared_traits(opened),
        model=ModelReport(weights_different=begin.different, absent=begin.absent),
    )
    return TrainAnswer(report=report, before=before, parameter_bytes=parameter_bytes)


def terminate(rank: Rank, request: CaseRequest) -> StepsAnswer:
    """Train until SIGTERM arrives within a step, then save."""
    side = WatchedSide(request, rank)
    opened = side.open()
    begin = side.begin(opened)
    inject_state(opened.trainer, begin.own, side.device.torch_device)
    answer = StepsAnswer()

    def note(*_: object) -> None:
        answer.was_signalled = True

    previous = signal.signal(signal.SIGTERM, note)
    try:
        with comparable(side.run.dtype, side.device):
            for number, batch in enumerate(side.batches):
                if number + 1 == side.resume_at:
                    _send_within_step(opened.root)
                answer.steps.append(make_step(opened, batch))
                if answer.was_signalled:
                    opened.trainer.save(side.folder / TERMINATED_CHECKPOINT)
                    break
    finally:
        signal.signal(signal.SIGTERM, previous)
    return answer


def _send_within_step(root: nn.Module) -> None:
    """Send SIGTERM to this process after the next forward pass."""

    def send(*_: object) -> None:
        handle.remove()
        os.kill(os.getpid(), signal.SIGTERM)

    handle = root.register_forward_hook(send)


def resume(rank: Rank, request: CaseRequest) -> StepsAnswer:
    """Continue from the checkpoint in new processes, save at the end, and tear down."""
    side = WatchedSide(request, rank)
    opened = side.open()
    # Another generator state than the saving process had: equal seeds would hide an unrestored one.
    torch.manual_seed(request.candidate.options.seed + 1)
    answer = StepsAnswer()
    try:
        opened.trainer.load(Path(request.checkpoint))
    except (AssayError, OSError, ValueError, KeyError, RuntimeError) as error:
        answer.problem = f"the checkpoint cannot be read: {type(error).__name__}: {error}"
        return answer
    with comparable(side.run.dtype, side.device):
        answer.steps = [make_step(opened, batch) for batch in side.batches[side.resume_at :]]
    held = hash_held_parts(opened.trainer)
    answer.held = {str(part): digest for part, digest in held.items()}
    end = read_golden_state(side.golden, len(side.batches))
    answer.trajectory = trajectory_of(opened.trainer.model, end)
    opened.trainer.save(side.folder / LAST_CHECKPOINT)
    opened.trainer.teardown()
    return answer


def restart(rank: Rank, request: CaseRequest) -> StepsAnswer:
    """Make the first step of another run that starts from the saved model."""
    side = WatchedSide(request, rank)
    batch = side.batches[side.resume_at]
    side.plan = replace(side.plan, model=str(Path(request.checkpoint) / MODEL_FOLDER))
    opened = side.open()
    with comparable(side.run.dtype, side.device):
        step = make_step(opened, batch)
    opened.trainer.teardown()
    return StepsAnswer(steps=[step])


def make_step(opened: OpenedTrainer, batch: Sequence[MicroBatch]) -> StepRecord:
    """Make one optimizer step, repeated while it is skipped."""
    # A skipped step changes nothing, so nothing has to be undone.
    done, num_skipped = step_until_made(lambda: opened.trainer.step(copied(batch)), lambda: None)
    return StepRecord(
        step=done.step,
        loss=done.loss,
        num_tokens=done.num_tokens,
        grad_norm=done.grad_norm,
        num_skipped=num_skipped,
    )
