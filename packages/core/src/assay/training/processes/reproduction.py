"""Record the programs of a training step, and find wrong state of a trainer, for `assay reproduce`.

The state is wrong if the trainer loads, keeps, saves or restores other values.
"""

import math
import random
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from assay.devices.registry import open_run
from assay.devices.run_string import parse_run
from assay.launch import Rank
from assay.models import load_model
from assay.models.inspect.inspection import inspect_load
from assay.recording.programs import RecordedValue
from assay.replay.value_programs import ProgramFinder, Wanted
from assay.reproduce.wrong_values import (
    WrongValue,
    compare_states,
    compare_values,
    compare_weights,
    numbers_of,
)
from assay.runs import Progress
from assay.runs.results import CHECKPOINT_FOLDER
from assay.training.batches import Batches, copied
from assay.training.processes.candidate import Candidate, CandidateSide
from assay.training.processes.free_run import load_saved, step_until_made
from assay.training.processes.reference import replay_golden
from assay.training.protocol import MIXED_PRECISION
from assay.training.replay.determinism import comparable
from assay.training.replay.step_observer import ReplayedSteps
from assay.training.reports import MOST_IN_ANY_ORDER, TrainCheck
from assay.training.state.files import leaves_of
from assay.training.state.states import current_state, find_kept_narrow, inject_state
from assay.training.trainers.reference import MODEL_FOLDER
from assay.training.trainers.registry import OpenedTrainer

_Values = dict[str, Tensor]


def record_programs(
    request: tuple[TrainCheck, Wanted], progress: Progress, rank: Rank | None = None
) -> list[RecordedValue]:
    """Record the programs of one side. Returns: the candidate's worst value of each port, or each of `sites`."""
    check, wanted = request
    found: dict[Any, RecordedValue] = {}

    def observe(steps: ReplayedSteps) -> None:
        model, trace = steps.opened.trainer.model, steps.modules.trace
        finder = ProgramFinder(model, wanted=wanted, trace=trace, found=found)
        steps.modules.observer = steps.handler.observer = finder
        steps.recording = finder.of_step

    with progress.task("recording the operations", check.options.steps, "steps"):
        if wanted.sites:
            replay_golden(check, open_run(parse_run(check.reference)), None, observe)
        else:
            side = Candidate(check, progress, rank)
            side.replay(side.begin(side.open()).own, observe=observe)
    return [*found.values()]


def find_wrong_values(
    check: TrainCheck, progress: Progress, rank: Rank | None = None
) -> list[WrongValue]:
    """Train from the candidate's own weights to a checkpoint and on, and once more from the checkpoint.

    Returns: the values that change where nothing should change them, in the order of the run.
    """
    side = CandidateSide(check, rank)
    with progress.step("comparing its state"), comparable(side.run.dtype, side.device):
        opened = side.open()
        return [*_compare_steps(side, opened, check), *_compare_checkpoint(side, opened, check)]


def _compare_steps(
    side: CandidateSide, opened: OpenedTrainer, check: TrainCheck
) -> Iterator[WrongValue]:
    """Compare the weights with the files, and after each step with those when the optimizer makes the next."""
    model, code = check.options.model, check.options.remote_code
    fresh = inspect_load(load_model(model, dtype=side.run.dtype, remote_code=code), code)
    kept = torch.float32 if MIXED_PRECISION in check.features else None
    yield from compare_weights(opened.trainer.model, fresh, "before the first step", kept)
    inject_state(opened.trainer, side.begin(opened).own, side.device.torch_device)
    found: list[WrongValue] = []
    left, step = _weights(side, opened), 0

    def begin(*_arguments: object) -> None:
        now = _weights(side, opened)
        found.extend(compare_states(left, now, f"at the optimizer's step {step}"))

    hook = opened.trainer.optimizer.register_step_pre_hook(begin)
    for step, batch in enumerate(side.batches[: check.options.resume_at]):
        if 0 < step == check.options.resume_at - 1:
            # A faulty trainer may write parts of the first checkpoint again.
            opened.trainer.save(check.folder / "first-checkpoint")
        _train(opened, [batch])
        left = _weights(side, opened)
    hook.remove()
    yield from found
    if MIXED_PRECISION in check.features:
        narrow = find_kept_narrow(opened.trainer)
        bits = torch.finfo(getattr(torch, side.run.dtype)).bits
        for name in (*narrow.parameters, *narrow.moments):
            yield from compare_values(f"the number of bits of {name}", 32, bits, "after a step")


def _compare_checkpoint(
    side: CandidateSide, opened: OpenedTrainer, check: TrainCheck
) -> Iterator[WrongValue]:
    """Compare a trainer with what it saves, and with the trainer that resumes."""
    resume_at, seed = check.options.resume_at, check.options.seed
    folder = check.folder / CHECKPOINT_FOLDER
    before = _values(side, opened)
    with opened.errors_in("save"):
        opened.trainer.save(folder)
    for wrong in compare_states(before, _values(side, opened), "after saving"):
        if "generators." not in wrong.name:  # a random file name may be drawn
            yield wrong
    saved = load_saved(opened, folder / MODEL_FOLDER, check)
    if not isinstance(saved, str):
        when = "in the model folder"
        yield from compare_states(saved.expected, saved.actual, when)
        for name, sides in saved.settings.items():
            yield from compare_values(name, *sides, when)
    _train(opened, side.batches[resume_at:])
    end = _values(side, opened)
    opened.trainer.teardown()
    resumed = side.open()
    torch.manual_seed(seed + 1)
    random.seed(seed + 1)
    with resumed.errors_in("load"):
        resumed.trainer.load(folder)
    yield from compare_states(before, _values(side, resumed), "after loading the checkpoint")
    _train(resumed, side.batches[resume_at:])
    in_one_order = math.prod(check.mesh.values()) <= MOST_IN_ANY_ORDER
    if opened.traits.inexact_resume is None and in_one_order:
        yield from compare_states(end, _values(side, resumed), "after the last resumed step")


def _train(opened: OpenedTrainer, batches: Batches) -> None:
    for batch in batches:
        with opened.errors_in("step"):
            step_until_made(partial(opened.trainer.step, copied(batch)))


def _values(side: CandidateSide, opened: OpenedTrainer) -> _Values:
    """Copy what a trainer holds, and what it says that it holds, by path."""
    state = current_state(opened.trainer, side.device.torch_device)
    flags = {f"{name} requires_grad": True for name in state["trainable"]}
    held = {"moments": state["moments"], "state_dict": opened.trainer.state_dict()}
    return _weights(side, opened) | _copy_leaves(flags | held)


def _weights(side: CandidateSide, opened: OpenedTrainer) -> _Values:
    return _copy_leaves(current_state(opened.trainer, side.device.torch_device)["model"])


def _copy_leaves(state: Mapping[str, object]) -> _Values:
    return {path: numbers_of(leaf).clone() for path, leaf in leaves_of(state)}
