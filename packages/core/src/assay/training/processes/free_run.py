"""A run of which nothing is replaced: its losses, its checkpoint, and its resumption from that."""

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from assay.errors import AssayError
from assay.models import load_model
from assay.sites import unwrapped_path
from assay.training.batches import MicroBatch, copied
from assay.training.processes.requests import CandidateRequest, FreeRun, StepRecord
from assay.training.replay.dropout import masks_observed
from assay.training.replay.step_observer import root_of
from assay.training.state.files import fingerprint, hash_value
from assay.training.state.parameters import named_parameters
from assay.training.state.records import HeldPart, StateValue
from assay.training.state.sharding import coordinates_of, local_part, whole
from assay.training.state.states import State, inject_state, plain_name
from assay.training.state.trajectory import trajectory_of
from assay.training.trainers.adapters import adapter_tensors, other_adapter_settings, read_adapter
from assay.training.trainers.reference import MODEL_FOLDER
from assay.training.trainers.registry import trainer_errors

K = TypeVar("K")

# Part of a state that saving may change: whoever draws a name for a file draws it.
_GENERATORS = "generators"

# How a model was loaded and is run, not what it computes.
_OF_LOADING = frozenset(
    {"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache"}
)


def run_freely(
    trainer: Any,  # noqa: ANN401 - any trainer
    open_another: Callable[[], Any],
    batches: Sequence[Sequence[MicroBatch]],
    start: State,
    golden_end: State,
    request: CandidateRequest,
    torch_device: str,
) -> FreeRun:
    """Train with a checkpoint in the middle, then once more from the checkpoint.

    start: of the first step; golden_end: of the recorded steps after the last one.
    On several ranks each of them does this, in step with the others.
    """
    options = request.options
    folder = Path(request.folder).parent / "checkpoint"
    run = FreeRun()
    inject_state(trainer, start, torch_device)
    with _masks_noted(trainer, run.masks):
        run.steps = _train(trainer, request, batches[: options.resume_at], run.held)
    expected, held = _hash_state(trainer), _hash_what_lasts(trainer)
    try:
        with trainer_errors(request.trainer or "reference", "save"):
            trainer.save(folder)
    except (AssayError, OSError, ValueError) as error:
        run.problem = f"the checkpoint cannot be written: {error}"
    else:
        changed = _changed(expected, held, trainer)
        run.changed_by_saving = [value for value in changed if value.part != _GENERATORS]
        try:
            _read_back(trainer, folder / MODEL_FOLDER, request, run)
        except (AssayError, OSError, ValueError) as error:
            run.problem = f"the model in the checkpoint cannot be read: {error}"
    with _masks_noted(trainer, run.masks):
        run.steps += _train(trainer, request, batches[options.resume_at :], run.held)
    end = _hash_parts(trainer)
    run.trajectory = trajectory_of(trainer.model, golden_end)
    trainer.teardown()
    if run.problem is not None:
        return run
    resumed = open_another()
    # A process that resumes has drawn other numbers before; its seed alone would hide it.
    torch.manual_seed(request.options.seed + 1)
    random.seed(request.options.seed + 1)
    try:
        with trainer_errors(request.trainer or "reference", "load"):
            resumed.load(folder)
    except (AssayError, OSError, ValueError, KeyError, RuntimeError) as error:
        run.problem = f"the checkpoint cannot be read: {type(error).__name__}: {error}"
        return run
    run.generators_compared = any(value.part == _GENERATORS for value in expected)
    run.not_restored = _changed(expected, held, resumed)
    run.compared = len(expected) + len(held)
    run.resumed = _train(resumed, request, batches[options.resume_at :], [])
    run.ended_otherwise = sorted(map(str, _unequal(end, _hash_parts(resumed))))
    run.resumed_trajectory = trajectory_of(resumed.model, golden_end)
    resumed.teardown()
    return run


@contextmanager
def _masks_noted(trainer: Any, masks: list[str]) -> Iterator[None]:  # noqa: ANN401 - any trainer
    """Inside, add to `masks` from which random numbers each micro-batch begins to drop."""
    begun = False

    def begin(module: nn.Module, inputs: Any) -> None:  # noqa: ANN401 - torch's own
        nonlocal begun
        del module, inputs
        begun = torch.is_grad_enabled()

    def note(state: Tensor) -> None:
        nonlocal begun
        if begun:
            masks.append(hashlib.sha256(state.numpy().tobytes()).hexdigest())
        begun = False

    handle = root_of(trainer).register_forward_pre_hook(begin)
    try:
        with masks_observed(note):
            yield
    finally:
        handle.remove()


def _train(
    trainer: Any,  # noqa: ANN401 - any trainer
    request: CandidateRequest,
    batches: Sequence[Sequence[MicroBatch]],
    held: list[list[tuple[HeldPart, str]]],
) -> list[StepRecord]:
    records = []
    for batch in batches:
        with trainer_errors(request.trainer or "reference", "step"):
            done = trainer.step(copied(batch))
        records.append(
            StepRecord(
                step=done.step, loss=done.loss, num_tokens=done.num_tokens, grad_norm=done.grad_norm
            )
        )
        if dist.is_initialized():
            held.append(list(_hash_parts(trainer).items()))
    return records


def _changed(
    expected: Mapping[StateValue, str],
    held: Mapping[StateValue, str],
    trainer: Any,  # noqa: ANN401 - any trainer
) -> list[StateValue]:
    """What is not as it was: of the state that the trainer returns, and of what it holds."""
    wrong = _unequal(held, _hash_what_lasts(trainer)) | _unequal(expected, _hash_state(trainer))
    return sorted(wrong)


def _unequal(expected: Mapping[K, str], actual: Mapping[K, str]) -> set[K]:
    keys = expected.keys() | actual.keys()
    return {key for key in keys if expected.get(key) != actual.get(key)}


def _hash_state(trainer: Any) -> dict[StateValue, str]:  # noqa: ANN401 - any trainer
    """Every value of the state that the trainer returns."""
    return {
        StateValue(
            path, part, unwrapped_path(path.removeprefix("model.")) if part == "model" else None
        ): digest
        for part, value in trainer.state_dict().items()
        for path, digest in fingerprint({part: value}).items()
    }


def _hash_what_lasts(trainer: Any) -> dict[StateValue, str]:  # noqa: ANN401 - any trainer
    """What a rank holds, and which parameters are trained."""
    held = {
        StateValue(
            f"model.{part}", "model", part.parameter if part.moment is None else None
        ): digest
        for part, digest in _hash_parts(trainer).items()
    }
    flags = {
        StateValue(f"model.{item.name} requires_grad", "model", item.name): str(
            item.tensor.requires_grad
        )
        for item in named_parameters(trainer.model)
    }
    return held | flags


def _hash_parts(trainer: Any) -> dict[HeldPart, str]:  # noqa: ANN401 - any trainer
    """Of every parameter, and of what the optimizer keeps of it, the part that this rank has."""
    held = {}
    for item in named_parameters(trainer.model):
        values = {None: item.tensor.detach(), **trainer.optimizer.state.get(item.tensor, {})}
        for moment, value in values.items():
            if isinstance(value, Tensor):
                part = HeldPart(item.name, moment, coordinates_of(value))
                held[part] = hash_value(local_part(value))
    return held


def _read_back(trainer: Any, folder: Path, request: CandidateRequest, run: FreeRun) -> None:  # noqa: ANN401
    """Compare what users would load with what the model holds, bit for bit."""
    if not folder.is_dir():
        run.notes.append(
            f"the checkpoint has no folder {MODEL_FOLDER}: what users would load is not compared"
        )
        return
    if request.options.lora and not hasattr(trainer.model, "peft_config"):
        run.notes.append("the adapter is not one of peft's: what users would load is not compared")
        return
    if request.options.lora:
        own, actual = adapter_tensors(trainer.model), read_adapter(folder)
        run.settings = other_adapter_settings(trainer.model, folder)
    else:
        own = trainer.model.state_dict()
        dtype = str(next(trainer.model.parameters()).dtype).removeprefix("torch.")
        loaded = load_model(str(folder), dtype=dtype, remote_code=request.options.remote_code)
        actual = loaded.model.state_dict()
        run.settings = _other_settings(trainer.model.config, loaded.config)
        if (folder / "generation_config.json").is_file():
            models: list[Any] = [trainer.model, loaded.model]
            run.settings += _other_settings(*(model.generation_config for model in models))
        if (declared := _declared_dtype(folder)) and torch.promote_types(
            declared, getattr(torch, dtype)
        ) != declared:
            run.settings.append(f"dtype {declared}")
    expected = {name: whole(value) for name, value in own.items()}
    if getattr(trainer, "partial_modules", None):
        # A stage of a pipeline has some of what the folder holds.
        actual = {name: value for name, value in actual.items() if name in expected}
    run.saved_compared = len(expected)
    run.saved = _wrong(expected, actual)


def _declared_dtype(folder: Path) -> torch.dtype | None:
    """In which dtype those who ask for none load the model in `folder`."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    declared = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    return declared if isinstance(declared, torch.dtype) else None


def _other_settings(own: Any, loaded: Any) -> list[str]:  # noqa: ANN401 - configurations
    """Settings of a model's configuration that are not those of the folder it was saved to."""
    pairs = [
        {k: v for k, v in one.to_dict().items() if k not in _OF_LOADING} for one in (own, loaded)
    ]
    return sorted(
        name for name in pairs[0].keys() & pairs[1].keys() if pairs[0][name] != pairs[1][name]
    )


def _wrong(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> list[str]:
    hashes = [
        fingerprint({plain_name(name): value for name, value in side.items()})
        for side in (expected, actual)
    ]
    return sorted(
        unwrapped_path(path)
        for path in hashes[0].keys() | hashes[1].keys()
        if hashes[0].get(path) != hashes[1].get(path)
    )
