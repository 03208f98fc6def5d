"""Trains without injection, saves a checkpoint in the middle, and resumes from it."""

import hashlib
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from assay.devices.run_string import parse_run
from assay.dtypes import float_format
from assay.errors import AssayError, UsageError
from assay.files import read_json_object
from assay.models import load_model
from assay.models.config_files import record_tokenizer
from assay.progress import advance_task, subtask
from assay.runs.results import CHECKPOINT_FOLDER
from assay.sites import unwrapped_path
from assay.training.batches import copied
from assay.training.protocol import MIXED_PRECISION, MicroBatch, StepReport
from assay.training.replay.determinism import masks_observed
from assay.training.reports import FreeRun, StateValue, StepRecord, TrainCheck
from assay.training.state.files import fingerprint
from assay.training.state.parameters import local_part, named_parameters, whole
from assay.training.state.states import (
    DrawnGenerators,
    State,
    find_kept_narrow,
    generator_states,
    hash_held_parts,
    inject_state,
    plain_name,
    restore_generators,
    rounded_weights,
    trajectory_of,
)
from assay.training.trainers.adapters import adapter_tensors, other_adapter_settings, read_adapter
from assay.training.trainers.reference import MODEL_FOLDER
from assay.training.trainers.registry import OpenedTrainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from assay.training.protocol import Trainer


# DeepSpeed's scale starts at 2**16, in older versions at 2**32 (`initial_scale_power`). Each skipped
# step halves it. Gradients that overflow at scale 1 overflow without a scale too.
MOST_SKIPPED = 32


def step_until_made(
    step: Callable[[], StepReport], begin_again: Callable[[], None] | None = None
) -> tuple[StepReport, int]:
    """Call `step` until it is not skipped, and `begin_again` before each new try, if there is any.

    Returns: the report of the last try, and the number of skipped ones; `MOST_SKIPPED` + 1 if all.
    Raises: UsageError if only some ranks skip.
    """
    report = step()
    for num_skipped in range(MOST_SKIPPED + 1):
        if not _is_skipped(report):
            return report, num_skipped
        if num_skipped < MOST_SKIPPED:
            if begin_again is not None:
                begin_again()
            report = step()
    return report, MOST_SKIPPED + 1


def _is_skipped(report: StepReport) -> bool:
    if not dist.is_initialized():
        return report.skipped
    of_ranks = [False] * dist.get_world_size()
    dist.all_gather_object(of_ranks, report.skipped)
    if len(set(of_ranks)) > 1:
        skipping = [rank for rank, skipped in enumerate(of_ranks) if skipped]
        raise UsageError(
            f"step {report.step} is skipped on the ranks {skipping} of {len(of_ranks)} alone: a step"
            " is made by all ranks or by none"
        )
    return report.skipped


K = TypeVar("K")

# The part of a state that saving may change, for example by drawing a random file name.
_GENERATORS = "generators"

# Elements of a parameter that show if a step changes it. Rounding may hide an update in some of them,
# but not in weights near zero, whose values are finely spaced.
_SAMPLED = 1024

_DTYPE = "dtype"

# Settings about loading and running a model that do not change its results.
_OF_LOADING = frozenset(
    {"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache"}
)


@dataclass(frozen=True, slots=True)
class _Saved:
    """Hashes of a trainer's values when it saves."""

    state: Mapping[StateValue, str]
    """Values that its `state_dict` returns."""
    lasting: Mapping[StateValue, str]
    """Values that its model and optimizer hold."""
    generators: frozenset[str]


def run_freely(
    opened: OpenedTrainer,
    open_another: Callable[[], OpenedTrainer],
    batches: Sequence[Sequence[MicroBatch]],
    start: State,
    golden_end: State,
    request: TrainCheck,
    torch_device: str,
) -> FreeRun:
    """Train with a checkpoint in the middle, then once more from the checkpoint.

    If there is a step before it, save twice and resume from the second checkpoint: a faulty trainer
    may write parts of the first one again. On several ranks, all call this in step.

    start: state before the first step.
    golden_end: state after the last recorded step.
    """
    resume_at, trainer = request.options.resume_at, opened.trainer
    folder = request.folder.parent / CHECKPOINT_FOLDER
    run, drawn = FreeRun(), DrawnGenerators(torch_device)
    inject_state(trainer, start, torch_device)
    first = folder.with_name("first-checkpoint") if resume_at > 1 else None
    if first is not None:
        with masks_noted(opened, partial(_note_mask, run)):
            run.steps = _train(opened, batches[: resume_at - 1], run, drawn)
        with subtask("saving a checkpoint"):
            _save(opened, first, run)
    with masks_noted(opened, partial(_note_mask, run)):
        run.steps += _train(opened, batches[len(run.steps) : resume_at], run, drawn)
    with subtask("saving a checkpoint"):
        saved = _save(opened, folder, run)
    if run.problem is None:
        try:
            with subtask("reading the model of the checkpoint"):
                # Some models draw random numbers as they are loaded.
                states = generator_states(torch_device)
                _read_back(opened, folder / MODEL_FOLDER, request, run)
                restore_generators(states, torch_device)
        except (AssayError, OSError, ValueError) as error:
            run.problem = f"the model in the checkpoint cannot be read: {error}"
    with (
        masks_noted(opened, partial(_note_mask, run)),
        _precision_noted(opened, start, request, run),
    ):
        run.steps += _train(opened, batches[resume_at:], run, drawn)
    end, generators_end = hash_held_parts(trainer), drawn.hashes()
    run.trajectory = trajectory_of(trainer.model, golden_end)
    trainer.teardown()
    if first is not None and not (dist.is_initialized() and dist.get_rank()):
        shutil.rmtree(first, ignore_errors=True)  # as large as the second one
    if run.problem is not None:
        return run
    resumed = open_another()
    # A resuming process has drawn other numbers before. The same seed would hide that.
    torch.manual_seed(request.options.seed + 1)
    random.seed(request.options.seed + 1)
    try:
        with resumed.errors_in("load"), subtask("loading the checkpoint"):
            resumed.trainer.load(folder)
    except (AssayError, OSError, ValueError, KeyError, RuntimeError) as error:
        run.problem = f"the checkpoint cannot be read: {type(error).__name__}: {error}"
        return run
    run.generators_compared = any(value.part == _GENERATORS for value in saved.state)
    run.not_restored = _changed(saved, resumed.trainer)
    run.compared = len(saved.state) + len(saved.lasting)
    run.resumed = _train(resumed, batches[resume_at:], FreeRun(), drawn)
    # Generators outside of the trainer's state need no restoring if no step draws from them, or if each
    # step seeds them.
    changed_generators = _unequal(generators_end, drawn.hashes())
    missed = changed_generators & (drawn.names - saved.generators)
    run.not_restored += [
        StateValue(f"{_GENERATORS}.{name}", _GENERATORS) for name in sorted(missed)
    ]
    run.ended_otherwise = sorted(map(str, _unequal(end, hash_held_parts(resumed.trainer))))
    # Equal bits end equally far away. For ranks, measuring is a collective: none may leave it out.
    is_same = not run.ended_otherwise and not dist.is_initialized()
    run.resumed_trajectory = (
        run.trajectory if is_same else trajectory_of(resumed.trainer.model, golden_end)
    )
    resumed.trainer.teardown()
    return run


@contextmanager
def _precision_noted(
    opened: OpenedTrainer, start: State, request: TrainCheck, run: FreeRun
) -> Iterator[None]:
    """Note in `run` the precision of weights and moments in the steps inside, if one is promised."""
    dtype = parse_run(request.candidate).dtype
    if MIXED_PRECISION not in request.features or not float_format(dtype).is_narrow:
        yield
        return
    with rounded_weights(opened.trainer, start["model"], getattr(torch, dtype)) as rounded:
        yield
    run.kept = replace(find_kept_narrow(opened.trainer), rounded=rounded)


def _note_mask(run: FreeRun, state: Tensor) -> None:
    run.masks.append(hashlib.sha256(state.numpy().tobytes()).hexdigest())


@contextmanager
def masks_noted(opened: OpenedTrainer, observer: Callable[[Tensor], None]) -> Iterator[None]:
    """Call `observer` with the generator's state at each micro-batch's first dropout inside."""
    begun = False

    def begin(module: nn.Module, inputs: object) -> None:
        nonlocal begun
        del module, inputs
        begun = torch.is_grad_enabled()

    def note(state: Tensor) -> None:
        nonlocal begun
        if begun:
            observer(state)
        begun = False

    handle = opened.root.register_forward_pre_hook(begin)
    try:
        with masks_observed(note):
            yield
    finally:
        handle.remove()


def _train(
    opened: OpenedTrainer,
    batches: Sequence[Sequence[MicroBatch]],
    run: FreeRun,
    drawn: DrawnGenerators,
) -> list[StepRecord]:
    """Make a step with each batch, and note in `run` the values that each rank holds after it."""
    records = []
    for batch in batches:
        begin_again = partial(_begin_again, run, len(run.masks), drawn, drawn.states())
        before = _sample_trained(opened.trainer)
        with opened.errors_in("step"), drawn.observed():
            done, num_skipped = step_until_made(partial(_step, opened.trainer, batch), begin_again)
        advance_task("steps")
        after = _sample_trained(opened.trainer)
        records.append(
            StepRecord(
                step=done.step,
                loss=done.loss,
                num_tokens=done.num_tokens,
                grad_norm=done.grad_norm,
                updated=not all(map(torch.equal, before, after)),
                num_skipped=num_skipped,
            )
        )
        if dist.is_initialized():
            run.held.append(list(hash_held_parts(opened.trainer).items()))
    return records


def _sample_trained(trainer: "Trainer") -> list[Tensor]:
    """Copy some elements of this rank's part of each parameter that the optimizer holds."""
    parameters = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    return [local_part(p.detach()).flatten()[:_SAMPLED].cpu().clone() for p in parameters]


def _begin_again(
    run: FreeRun, num_masks: int, drawn: DrawnGenerators, generators: dict[str, Any]
) -> None:
    del run.masks[num_masks:]
    drawn.restore(generators)


def _step(trainer: "Trainer", batch: Sequence[MicroBatch]) -> StepReport:
    return trainer.step(copied(batch))


def _save(opened: OpenedTrainer, folder: Path, run: FreeRun) -> _Saved:
    """Have the trainer write a checkpoint, note errors in `run`, and return the values before."""
    trainer = opened.trainer
    state = trainer.state_dict()
    saved = _Saved(_hash_state(state), _hash_what_lasts(trainer), frozenset(state["generators"]))
    del state  # a whole copy, for sharded trainers
    try:
        with opened.errors_in("save"):
            trainer.save(folder)
    except (AssayError, OSError, ValueError) as error:
        run.problem = f"the checkpoint cannot be written: {error}"
    else:
        run.changed_by_saving += [
            value
            for value in _changed(saved, trainer)
            if value.part != _GENERATORS and value not in run.changed_by_saving
        ]
    return saved


def _changed(saved: _Saved, trainer: "Trainer") -> list[StateValue]:
    """List changed values, of the state that the trainer returns and of what it holds."""
    state = _hash_state(trainer.state_dict())
    return sorted(_unequal(saved.lasting, _hash_what_lasts(trainer)) | _unequal(saved.state, state))


def _unequal(expected: Mapping[K, str], actual: Mapping[K, str]) -> set[K]:
    keys = expected.keys() | actual.keys()
    return {key for key in keys if expected.get(key) != actual.get(key)}


def _hash_state(state: Mapping[str, Any]) -> dict[StateValue, str]:
    return {
        StateValue(
            path, part, unwrapped_path(path.removeprefix("model.")) if part == "model" else None
        ): digest
        for part, value in state.items()
        for path, digest in fingerprint({part: value}).items()
    }


def _hash_what_lasts(trainer: "Trainer") -> dict[StateValue, str]:
    """Hash the values that this rank holds, and the `requires_grad` flags."""
    held = {
        StateValue(
            f"model.{part}", "model", part.parameter if part.moment is None else None
        ): digest
        for part, digest in hash_held_parts(trainer).items()
    }
    flags = {
        StateValue(f"model.{item.name} requires_grad", "model", item.name): str(
            item.tensor.requires_grad
        )
        for item in named_parameters(trainer.model)
    }
    return held | flags


class SavedModel(NamedTuple):
    """The model that was saved, and its checkpoint, loaded again as a user would load it."""

    expected: Mapping[str, Tensor]
    actual: Mapping[str, Tensor]
    settings: Mapping[str, tuple[object, object]]
    """Settings that differ: the model's value and the saved one."""


def _read_back(opened: OpenedTrainer, folder: Path, request: TrainCheck, run: FreeRun) -> None:
    """Load the checkpoint's model as users would, and note in `run` how it differs from the model."""
    saved = load_saved(opened, folder, request)
    if isinstance(saved, str):
        run.notes.append(f"{saved}: what users would load is not compared")
        return
    model, is_whole = request.options.model, request.trainer and not request.options.lora
    if is_whole and record_tokenizer(model) and not record_tokenizer(str(folder)):
        run.notes.append(f"the saved model lacks the tokenizer of {model}")
    run.settings = [
        f"{name} {value}" if name == _DTYPE else name for name, (_, value) in saved.settings.items()
    ]
    run.saved_compared = len(saved.expected)
    run.saved = _wrong(saved.expected, saved.actual)


def load_saved(opened: OpenedTrainer, folder: Path, request: TrainCheck) -> SavedModel | str:
    """Load the checkpoint's model as users would. Returns: why it cannot be compared, if it cannot."""
    model = cast("PreTrainedModel", opened.trainer.model)
    if not folder.is_dir():
        return f"the checkpoint has no folder {MODEL_FOLDER}"
    if request.options.lora and not hasattr(model, "peft_config"):
        return "the adapter is not one of peft's"
    if request.options.lora:
        own, actual = adapter_tensors(model), read_adapter(folder)
        settings = other_adapter_settings(model, folder)
    else:
        own = model.state_dict()
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        loaded = load_model(str(folder), dtype=dtype, remote_code=request.options.remote_code)
        actual = loaded.model.state_dict()
        read_back = cast("PreTrainedModel", loaded.model)
        settings = _other_settings(model.config.to_dict(), read_back.config.to_dict())
        if (folder / "generation_config.json").is_file():
            own_config, saved_config = model.generation_config, read_back.generation_config
            settings |= _other_settings(own_config.to_dict(), saved_config.to_dict())
        if (declared := _declared_dtype(folder)) and torch.promote_types(
            declared, getattr(torch, dtype)
        ) != declared:
            settings[_DTYPE] = f"torch.{dtype}", str(declared)
    expected = {name: whole(value) for name, value in own.items()}
    if opened.traits.partial_modules:
        # The folder holds the tensors of all pipeline stages.
        actual = {name: value for name, value in actual.items() if name in expected}
    return SavedModel(expected, actual, settings)


def _declared_dtype(folder: Path) -> torch.dtype | None:
    """Return the dtype in which the model in `folder` is loaded by default."""
    config = read_json_object(folder / "config.json")
    declared = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    return declared if isinstance(declared, torch.dtype) else None


def _other_settings(
    own: Mapping[str, Any], loaded: Mapping[str, Any]
) -> dict[str, tuple[object, object]]:
    own, loaded = _without_loading(own), _without_loading(loaded)
    names = sorted(own.keys() & loaded.keys())
    return {name: (own[name], loaded[name]) for name in names if own[name] != loaded[name]}


def _without_loading(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_loading(value) if isinstance(value, Mapping) else value
        for name, value in settings.items()
        if name not in _OF_LOADING
    }


def _wrong(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]) -> list[str]:
    hashes = [
        fingerprint({plain_name(name): value for name, value in side.items()})
        for side in (expected, actual)
    ]
    return sorted(
        unwrapped_path(path)
        for path in hashes[0].keys() | hashes[1].keys()
        if hashes[0].get(path) != hashes[1].get(path)
    )
