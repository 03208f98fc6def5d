"""Record the programs of a training step, and find wrong state of a trainer, for `assay reproduce`.

The state is wrong if the trainer loads, keeps, saves or restores other values.
"""

import math
import random
from collections.abc import Iterator
from functools import partial
from itertools import chain
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
from assay.reproduce.wrong_values import WrongValue, compare_states, compare_values, compare_weights
from assay.runs import Progress
from assay.runs.results import CHECKPOINT_FOLDER
from assay.sites import Phase
from assay.training.batches import Batches, copied
from assay.training.processes.candidate import Candidate, CandidateSide
from assay.training.processes.free_run import load_saved, masks_noted, step_until_made
from assay.training.processes.reference import replay_golden
from assay.training.protocol import MIXED_PRECISION
from assay.training.replay.determinism import comparable
from assay.training.replay.step_observer import ReplayedSteps
from assay.training.replay.step_values import step_adamw
from assay.training.reports import MOST_IN_ANY_ORDER, TrainCheck
from assay.training.state.files import leaves_of
from assay.training.state.parameters import named_parameters, whole
from assay.training.state.states import current_state, fits, inject_state
from assay.training.trainers.reference import MODEL_FOLDER
from assay.training.trainers.registry import OpenedTrainer

# A longer sequence of numbers becomes a tensor, such as the state of Python's generator.
_LONG = 16

_Values = dict[str, object]


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
    request: tuple[TrainCheck, Phase], progress: Progress, rank: Rank | None = None
) -> list[WrongValue]:
    """Train from the candidate's own weights to a checkpoint and on, and once more from the checkpoint.

    request: its phase is that of the failure.
    Returns: the values that change where nothing should change them, in the order of the run.
    """
    check, phase = request
    side = CandidateSide(check, rank)
    with progress.step("comparing its state"):
        if phase == "checkpoint":
            with comparable(side.run.dtype, side.device):
                return list(_compare_checkpoint(side, check))
        return list(chain(_compare_start(side, check), _compare_steps(side, check)))


def _compare_start(side: CandidateSide, check: TrainCheck) -> Iterator[WrongValue]:
    """Compare the weights before the first step with the files."""
    model, code = check.options.model, check.options.remote_code
    fresh = inspect_load(load_model(model, dtype=side.run.dtype, remote_code=code), code)
    kept = torch.float32 if MIXED_PRECISION in check.features else None
    own = side.open().trainer.model
    yield from compare_weights(own, fresh, "before the first step", kept)


def _compare_steps(side: CandidateSide, check: TrainCheck) -> Iterator[WrongValue]:
    """Compare the weights after each step with those when the optimizer makes the next."""
    opened = side.open()
    inject_state(opened.trainer, side.begin(opened).own, side.device.torch_device)
    found: list[WrongValue] = []
    before, expected, step = _weights(side, opened), _Values(), 0
    narrow = getattr(torch, side.run.dtype)

    def begin(*_arguments: object) -> None:
        now = _weights(side, opened)
        found.extend(compare_states(before, now, f"at the optimizer's step {step}"))
        if MIXED_PRECISION in check.features:
            expected.update(_updated_in_float32(side, opened, step))

    opened.trainer.optimizer.register_step_pre_hook(begin)
    states: list[Tensor] = []
    with comparable(side.run.dtype, side.device), masks_noted(opened, states.append):
        for step, batch in enumerate(side.batches[: check.options.resume_at]):
            drawn, left = len(states), torch.get_rng_state()
            _train(opened, [batch])
            for state in states[drawn : drawn + 1]:
                if any(torch.equal(one, state) for one in states[:drawn]):
                    when = f"at the first dropout of step {step}, which has the state of an earlier one"
                    found.extend(compare_values("generators.torch", left, state, when))
            before = _weights(side, opened)
            now, when = _values(side, opened), f"after the optimizer's step {step}"
            for name, value in expected.items():
                actual = now.get(name)
                if isinstance(actual, Tensor) and fits(actual, narrow).all():
                    found.extend(compare_values(name, value, actual, when, torch.float32))
    yield from found


def _updated_in_float32(side: CandidateSide, opened: OpenedTrainer, step: int) -> _Values:
    """Return weights and moments that AdamW makes in float32 of the trainer's gradients."""
    expected: _Values = {}
    for item in named_parameters(opened.trainer.model):
        if (gradient := item.tensor.grad) is None:
            continue
        weight, wide = (whole(one.detach()).float() for one in (item.tensor, gradient))
        held = opened.trainer.optimizer.state.get(item.tensor, {})
        held = {name: whole(value) for name, value in held.items()}
        settings = side.plan.settings_of(item.name, step)
        expected[item.name], moments = step_adamw(weight, wide, held, settings, torch.float32)
        for name in ("exp_avg", "exp_avg_sq"):
            expected[f"moments.{item.name}.{name}"] = moments[name]
    return expected


def _compare_checkpoint(side: CandidateSide, check: TrainCheck) -> Iterator[WrongValue]:
    """Compare a trainer with what it saves, and with the trainer that resumes."""
    resume_at, seed = check.options.resume_at, check.options.seed
    folder = check.folder / CHECKPOINT_FOLDER
    opened = side.open()
    inject_state(opened.trainer, side.begin(opened).own, side.device.torch_device)
    if resume_at > 1:  # a faulty trainer may write parts of the first checkpoint again
        _train(opened, side.batches[: resume_at - 1])
        opened.trainer.save(folder.with_name("first-checkpoint"))
    _train(opened, side.batches[max(0, resume_at - 1) : resume_at])
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
    held = {name: state[name] for name in ("moments", "trainable")}
    parts = leaves_of(held | {"state_dict": opened.trainer.state_dict()})
    return _weights(side, opened) | {path: _copied(leaf) for path, leaf in parts}


def _weights(side: CandidateSide, opened: OpenedTrainer) -> _Values:
    held = current_state(opened.trainer, side.device.torch_device)
    return {path: _copied(leaf) for path, leaf in leaves_of(held["model"])}


def _copied(leaf: object) -> object:
    if isinstance(leaf, Tensor):
        return leaf.detach().cpu().clone()
    numbers = leaf[1] if isinstance(leaf, tuple) and len(leaf) > 1 else leaf
    if not isinstance(numbers, list | tuple) or len(numbers) < _LONG:
        return leaf
    return torch.tensor(numbers) if all(isinstance(one, int) for one in numbers) else leaf
