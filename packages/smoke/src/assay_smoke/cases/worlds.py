"""The work of a case's ranks, world by world. Judges nothing."""

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from assay.devices.registry import describe_run
from assay.errors import AssayError
from assay.launch import Rank
from assay.training.batches import MicroBatch, copied
from assay.training.processes.requests import ReferenceRequest, StepRecord
from assay.training.processes.skipped_steps import step_until_made
from assay.training.processes.trainer_report import ModelReport, TrainerReport, declared_traits
from assay.training.replay.conditions import comparable
from assay.training.state.files import read_golden_state
from assay.training.state.parameter_records import trajectory_of
from assay.training.state.states import differing_parameters, inject_state
from assay.training.trainers.reference import MODEL_FOLDER
from assay.training.trainers.registry import OpenedTrainer, describe_trainer
from assay_smoke.cases.reference import train_reference
from assay_smoke.cases.requests import (
    LAST_CHECKPOINT,
    TERMINATED_CHECKPOINT,
    CaseRequest,
    ResumeAnswer,
    TerminateAnswer,
    TrainAnswer,
)
from assay_smoke.cases.watched_side import (
    WatchedSide,
    hash_held,
    hash_model,
    held_parameter_bytes,
    live_tensors,
    survivors,
)

# Each takes the rank and a request as JSON, and returns its answer as JSON.
Answer = dict[str, Any]


def reference(rank: Rank, body: Answer) -> Answer:
    """Train the reference in a world of one rank."""
    del rank
    return train_reference(ReferenceRequest.model_validate(body)).model_dump(mode="json")


def train(rank: Rank, body: Answer) -> Answer:
    """Set up, train, save, train on and tear down; then resume in the same process."""
    request = CaseRequest.model_validate(body)
    side = WatchedSide(request, rank)
    alive = live_tensors()
    report, before, held, parameter_bytes = _train(side, request, rank)
    answer = TrainAnswer(
        report=report,
        before=before,
        after=side.ended[0],
        held=held,
        parameter_bytes=parameter_bytes,
        survivors=survivors(alive),
    )
    return answer.model_dump(mode="json")


def _train(
    side: WatchedSide, request: CaseRequest, rank: Rank
) -> tuple[TrainerReport, dict[str, str], dict[str, str], int]:
    opened = side.open()
    begin = side.begin(opened)
    trainer = opened.trainer
    different = [
        name for name in differing_parameters(begin.golden, trainer.model) if ".lora_" not in name
    ]
    inject_state(trainer, begin.own, side.device.torch_device)
    before = hash_model(opened, side.device.torch_device)
    described = describe_trainer(request.candidate.trainer, side.plan, trainer.model)
    parameter_bytes = held_parameter_bytes(opened, rank.size)
    free = side.train_freely(opened, begin)
    report = TrainerReport(
        run=describe_run(side.device, side.run) | described,
        free=free,
        coordinates=side.coordinates,
        traits=declared_traits(opened),
        model=ModelReport(weights_different=different, absent=begin.absent),
    )
    last = {str(part): digest for part, digest in free.held[-1]} if free.held else {}
    return report, before, last, parameter_bytes


def terminate(rank: Rank, body: Answer) -> Answer:
    """Train until SIGTERM arrives within a step, then save."""
    request = CaseRequest.model_validate(body)
    side = WatchedSide(request, rank)
    opened = side.open()
    begin = side.begin(opened)
    inject_state(opened.trainer, begin.own, side.device.torch_device)
    signals: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    steps: list[StepRecord] = []
    resume_at = request.candidate.options.resume_at
    try:
        with comparable(side.run.dtype, side.device):
            for number, batch in enumerate(side.batches):
                if number + 1 == resume_at:
                    _send_within_step(opened.root)
                steps.append(make_step(opened, batch))
                if signals:
                    opened.trainer.save(
                        Path(request.candidate.folder).parent / TERMINATED_CHECKPOINT
                    )
                    break
    finally:
        signal.signal(signal.SIGTERM, previous)
    answer = TerminateAnswer(was_signalled=bool(signals), steps=steps)
    return answer.model_dump(mode="json")


def _send_within_step(root: nn.Module) -> None:
    """Send SIGTERM to this process after the next forward pass."""

    def send(*_: object) -> None:
        handle.remove()
        os.kill(os.getpid(), signal.SIGTERM)

    handle = root.register_forward_hook(send)


def resume(rank: Rank, body: Answer) -> Answer:
    """Continue from the checkpoint in new processes, save at the end, and tear down."""
    request = CaseRequest.model_validate(body)
    side = WatchedSide(request, rank)
    options = request.candidate.options
    opened = side.open()
    # Another generator state than the saving process had: equal seeds would hide an unrestored one.
    torch.manual_seed(options.seed + 1)
    answer = ResumeAnswer()
    try:
        opened.trainer.load(Path(request.checkpoint))
    except (AssayError, OSError, ValueError, KeyError, RuntimeError) as error:
        answer.problem = f"the checkpoint cannot be read: {type(error).__name__}: {error}"
        return answer.model_dump(mode="json")
    with comparable(side.run.dtype, side.device):
        answer.steps = [make_step(opened, batch) for batch in side.batches[options.resume_at :]]
    answer.held = hash_held(opened)
    end = read_golden_state(side.golden, len(side.batches))
    answer.trajectory = trajectory_of(opened.trainer.model, end)
    opened.trainer.save(Path(request.candidate.folder).parent / LAST_CHECKPOINT)
    opened.trainer.teardown()
    return answer.model_dump(mode="json")


def restart(rank: Rank, body: Answer) -> Answer:
    """Make the first step of another run that starts from the saved model."""
    request = CaseRequest.model_validate(body)
    side = WatchedSide(request, rank)
    resume_at = request.candidate.options.resume_at
    batch = side.batches[resume_at]
    side.plan = replace(side.plan, model=str(Path(request.checkpoint) / MODEL_FOLDER))
    opened = side.open()
    with comparable(side.run.dtype, side.device):
        step = make_step(opened, batch)
    opened.trainer.teardown()
    return step.model_dump(mode="json")


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
